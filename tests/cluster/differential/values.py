"""Keys of every type, and the many ways in which SQL can spell the same one.

What always holds: keys of one family compare with each other (int2 = int8, date = timestamp); the pools of a family
overlap, so that joins find partners; a few keys are strange on purpose (empty, blank, quoted, infinite, equal but
written differently).
"""

from .tree import Value

FAMILY = {"int2": "int", "int4": "int", "int8": "int", "numeric": "int", "text": "text", "varchar(20)": "text",
          "char(8)": "text", "uuid": "uuid", "date": "time", "timestamp": "time", "timestamptz": "time",
          "bytea": "bytea", "bool": "bool"}
OIDS = {"bool": 16, "bytea": 17, "int8": 20, "int2": 21, "int4": 23, "text": 25, "char(8)": 1042, "varchar(20)": 1043,
        "date": 1082, "timestamp": 1114, "timestamptz": 1184, "numeric": 1700, "uuid": 2950, "int2[]": 1005,
        "int4[]": 1007, "int8[]": 1016, "text[]": 1009, "char(8)[]": 1014, "varchar(20)[]": 1015, "bytea[]": 1001,
        "date[]": 1182, "timestamp[]": 1115, "timestamptz[]": 1185, "numeric[]": 1231, "uuid[]": 2951, "bool[]": 1000}

_SMALL = [str(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, -1, -7, 100, 1000)]
_WORDS = ["a", "b", "c", "d", "A", "007", "7", "123", "x'y", "back\\", "ab cd", "NULL", "", "ä", "{e}", "$1", "%s"]
_UUIDS = [f"{n:08x}-00{n:02x}-4000-8000-0000000abc{n:02x}" for n in range(1, 15)] + [
    "ffffffff-ffff-ffff-ffff-ffffffffffff", "00000000-0000-0000-0000-000000000000"]
_DAYS = ["2024-02-29", "2024-03-10", "2024-03-31", "2000-01-01", "1970-01-01", "1969-12-31", "2024-11-03",
         "infinity", "-infinity", "0044-03-15 BC", "2024-01-01", "2024-01-02", "9999-12-31"]
_TIMES = ["2024-02-29 12:00:00", "2024-03-10 02:30:00", "1999-12-31 23:59:59.999999", "1970-01-01 00:00:00.5"]

POOLS = {
    "int2": [*_SMALL, "32767", "-32768"],
    "int4": [*_SMALL, "2147483647", "-2147483648", "32768"],
    "int8": [*_SMALL, "9223372036854775807", "-9223372036854775808", "2147483648"],
    "numeric": [*_SMALL, "1.0", "1.00", "7.000", "0.0", "-0.5", "1.5", "1e10", "NaN", "12345678901234567890.123"],
    "text": [*_WORDS, "a ", " a", "a  ", "\t", "line\nbreak", "x" * 300, "y" * 2400],
    "varchar(20)": [*_WORDS, "a ", "twenty characters ok"],
    "char(8)": [*_WORDS, " a", "eightchr"],
    "uuid": _UUIDS,
    "date": _DAYS,
    "timestamp": [*_DAYS, *_TIMES],
    "timestamptz": [*_DAYS, *_TIMES, "2024-03-10 07:30:00+00", "2024-02-29 12:00:00+05:30"],
    "bytea": ["\\x", "\\x00", "\\x61", "\\x6162", "\\xdeadbeef", "\\xff", "\\x0000", "\\x5c", "\\x27", "\\x41",
              "\\x" + "ab" * 100],
    "bool": ["t", "f"],
}

HOT = 4


def quoted(text):
    return "'" + text.replace("'", "''") + "'"


def literal(type, text):
    """A typed literal."""
    return "NULL::" + type if text is None else f"{quoted(text)}::{type}"


def random_text(rng, type):
    """A value of a type; every other time one of the first few, so that conditions and joins find rows."""
    pool = POOLS[type]
    return rng.choice(pool[:HOT] if rng.random() < 0.5 else pool)


def typed(rng, type, text=None):
    """A constant of exactly `type`, wherever it stands. A text that is given stays."""
    domain = type if text is None else None
    text = random_text(rng, type) if text is None else text
    return Value(type, text, literal(type, text), "{}::" + type, domain=domain)


def null(type):
    return Value(type, None, literal(type, None), "{}::" + type)


def array(rng, type, texts):
    """A constant array of `type`; None among the texts is a null."""
    items = ",".join("NULL" if t is None else '"' + t.replace("\\", "\\\\").replace('"', '\\"') + '"' for t in texts)
    text = "{" + items + "}"
    if rng.random() < 0.5:
        return Value(type + "[]", text, quoted(text) + f"::{type}[]")
    return Value(type + "[]", text, "ARRAY[" + ",".join(literal(type, t) for t in texts) + f"]::{type}[]",
                 "{}" + rng.choice(["", f"::{type}[]"]))


def spelled(rng, type, text=None):
    """A constant that is compared with a column of `type`, spelled in one of many ways, some of another type."""
    text = random_text(rng, type) if text is None else text
    other = rng.choice([t for t in OTHERS.get(type, [type]) if fits(t, text)] or [type])
    choices = [quoted(text), literal(type, text), f"({literal(type, text)})", f"CAST({quoted(text)} AS {type})"]
    choices += SPELLINGS[FAMILY[type]](text)
    if type == "int8":
        # int8 becomes oid with an error that depends on which rows are looked at first.
        choices = [choice for choice in choices if not choice.endswith("::oid")]
    choices.append(literal(other, text))
    bound = rng.choice([(type, "{}", True), (type, "{}", False), (type, "{}::" + type, True), (other, "{}", True),
                        (other, "{}::" + other, False), ("text", "{}::text::" + type, True)])
    return Value(bound[0], text, rng.choice(choices), bound[1], bound[2], type)


def rebound(rng, value):
    """Another text to bind to a parameter, None for null."""
    if rng.random() < 0.06:
        return None
    texts = [t for t in POOLS.get(value.domain, ()) if fits(value.type, t)]
    return rng.choice(texts[:HOT] if rng.random() < 0.5 else texts) if texts else value.text


OTHERS = {"int2": ["int4", "int8", "numeric"], "int4": ["int2", "int8", "numeric"], "int8": ["int2", "int4", "numeric"],
          "numeric": ["int4", "int8"], "text": ["varchar(20)", "char(8)"], "varchar(20)": ["text", "char(8)"],
          "char(8)": ["text", "varchar(20)"], "date": ["timestamp", "timestamptz"],
          "timestamp": ["date", "timestamptz"], "timestamptz": ["date", "timestamp"]}
_LIMITS = {"int2": 2**15, "int4": 2**31, "int8": 2**63}


def fits(type, text):
    if type in _LIMITS:
        try:
            return -_LIMITS[type] <= int(text) < _LIMITS[type]
        except ValueError:
            return False
    return {"char(8)": len(text) <= 8, "varchar(20)": len(text) <= 20}.get(type, True)


def _integers(text):
    plain = [text, f"({text})"] if "NaN" not in text else []
    whole = ("." not in text) and plain
    more = [f"{text}.0", f"{text}.00::numeric", f"({text} + 0)", f"{text}::numeric"] if whole else []
    if whole and abs(int(float(text))) < 1000:
        more += [f"{text}::float8", f"{text}::real", f"abs({text})::oid", f"{text}::int2", f"abs({text}) * sign({text})::int", f"'{text}'::smallint"]
    return plain + more


def _texts(text):
    tail = [f"({quoted(text[:1])} || {quoted(text[1:])})", f"{quoted(text)}::text", f"{quoted(text)} COLLATE \"C\"",
            f"concat({quoted(text)})", f"{quoted(text[:60])}::name"]
    return tail + [f"{quoted(text + '  ')}::char(30)", f"rtrim({quoted(text)})"]


def _uuids(text):
    bare = text.replace("-", "")
    return [quoted(text.upper()), quoted("{" + text + "}"), quoted(bare), quoted(bare.upper()) + "::uuid",
            f"('{bare[:4]}' || '{bare[4:]}')::uuid"]


def _times(text):
    if "infinity" in text or "BC" in text or ":" in text:
        return [f"{quoted(text)}::timestamp"]
    return [f"date {quoted(text)}", f"({quoted(text)}::date + 0)", f"({quoted(text)}::date - 1 + interval '1 day')",
            f"timestamp {quoted(text + ' 00:00')}", f"timestamptz {quoted(text + ' 00:00')}",
            f"make_date({int(text[:4])}, {int(text[5:7])}, {int(text[8:10])})"]


def _byteas(text):
    return [f"decode('{text[2:]}', 'hex')", quoted(text.upper().replace("X", "x", 1)), f"({quoted(text)}::bytea || ''::bytea)"]


SPELLINGS = {"int": _integers, "text": _texts, "uuid": _uuids, "time": _times, "bytea": _byteas, "bool": lambda text: []}
