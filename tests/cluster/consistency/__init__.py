"""Whether clients see their own writes, and never see time run backwards, while servers lag, die and are promoted."""
