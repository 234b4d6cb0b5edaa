"""Moves under load and in trouble: nothing may be lost, doubled, seen to waver, or left behind. Read runner.py next."""
