"""One side's session: sends a statement in one of several forms and keeps the answer in a comparable shape.

What always holds: values are compared as the server sent them, but numerics without the zeros that end their fraction
(which of two equal numerics DISTINCT keeps is undefined). Rows are compared as multisets, and in order of the columns
that ORDER BY names.
"""

import collections
import decimal
import re
import select
import time

import psycopg
from psycopg import pq

from .values import OIDS

FORMS = ["simple", "simple", "text", "text", "binary", "binary", "mixed", "mixed", "prepare", "prepare", "function", "guarded",
         "fetching", "executed", "cursor", "held"]
FUNCTIONS = ("function", "guarded", "fetching", "executed")  # in plpgsql
NUMERIC = 1700
_RECORD_ZEROS = re.compile(r"(?<![\w.])(-?\d+)(?:\.0+|(\.\d*?[1-9])0+)(?=[,)])")
OK = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.EMPTY_QUERY)


class Lost(Exception):
    """The connection broke: the backend crashed."""


class Answer:
    """Of one statement: `error` is an SQLSTATE or None."""

    def __init__(self, error=None, message="", tag="", columns=(), rows=()):
        self.error, self.message, self.tag = error, message, tag
        self.columns, self.rows = list(columns), list(rows)

    def __str__(self):
        if self.error:
            return f"ERROR {self.error}: {self.message}"
        shown = "\n".join("    " + " | ".join("NULL" if v is None else repr(v) for v in row) for row in self.rows[:12])
        more = f"\n    ... of {len(self.rows)} rows" if len(self.rows) > 12 else ""
        return f"{self.tag} {self.columns}\n{shown}{more}"


def difference(left, right, order=()):
    """Why two answers differ, in a few words, or None. `order`: output columns by which the rows must be sorted."""
    if left.error or right.error:
        # Of several constraints that rows of one statement violate, which is met first is undefined.
        same = left.error == right.error or (left.error or "")[:2] == (right.error or "")[:2] == "23"
        return None if same else f"error {left.error or 'none'} and {right.error or 'none'}"
    if left.tag != right.tag:
        return f"command tag {left.tag} and {right.tag}"
    if left.columns != right.columns:
        return "columns"
    if collections.Counter(left.rows) != collections.Counter(right.rows):
        return "rows"
    for each in order:
        if each >= len(left.columns):
            return None
    if [[row[c] for c in order] for row in left.rows] != [[row[c] for c in order] for row in right.rows]:
        return "order"
    return None


def _brief(message):
    """A message without the stack trace that a debug build appends."""
    return re.split(r"\n +0: ", message)[0].strip()


def same_number(text):
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        return text
    return str(number.normalize() + 0) if number.is_finite() else text


class Session:
    """A connection whose search_path names one of the two schemas."""

    def __init__(self, dsn, schema, encoder=None):
        self.schema, self.dsn = schema, dsn
        self.encoder = encoder or {}  # (type, text) -> binary, as the server encodes it
        self.connect()

    def connect(self):
        options = f"-c search_path={self.schema},public -c statement_timeout=60s -c client_min_messages=error"
        self.connection = psycopg.connect(self.dsn, autocommit=True, options=options)
        self.pg = self.connection.pgconn
        self.serial = 0

    def reconnect(self, seconds=60):
        self.connection.close()
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self.connect()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def close(self):
        self.connection.close()

    def command(self, sql):
        """Runs SQL that must not fail."""
        answer = self.simple(sql)
        if answer.error:
            raise AssertionError(f"{self.schema}: {answer}\n{sql}")
        return answer

    def simple(self, sql):
        return self._answer(self.pg.exec_(sql.encode()))

    @property
    def failed(self):
        """Whether the session is in a transaction that failed."""
        return self.pg.transaction_status == pq.TransactionStatus.INERROR

    @property
    def idle(self):
        """Whether the session is outside of any transaction."""
        return self.pg.transaction_status == pq.TransactionStatus.IDLE

    def _answer(self, result):
        if self.pg.status != pq.ConnStatus.OK:
            raise Lost(result.error_message.decode(errors="replace"))
        if result.status not in OK:
            state = result.error_field(pq.DiagnosticField.SQLSTATE)
            return Answer((state or b"?????").decode(), _brief(result.error_message.decode(errors="replace")))
        columns = [(result.fname(i).decode(), result.ftype(i)) for i in range(result.nfields)]
        rows = []
        for r in range(result.ntuples):
            row = [result.get_value(r, c) for c in range(result.nfields)]
            rows.append(tuple(
                v if v is None or result.fformat(c) else
                same_number(v.decode()) if columns[c][1] == NUMERIC else v.decode()
                for c, v in enumerate(row)))
        return Answer(None, "", (result.command_status or b"").decode(), columns, rows)

    def binary(self, type, text):
        key = (type, text)
        if text is not None and key not in self.encoder:
            result = self.pg.exec_params(f"SELECT $1::{type}".encode(), [text.encode()], result_format=1)
            if result.status not in OK:
                raise AssertionError(result.error_message.decode())
            self.encoder[key] = result.get_value(0, 0)
        return self.encoder.get(key)

    def prepared(self, sql, sets, form):
        """Prepares `sql` and runs it with each set of values: (type, text, declared)."""
        self.serial += 1
        name = f"s{self.serial}".encode()
        for values in sets:  # outside of a failed transaction
            for type, text, _ in values:
                if not self.failed:
                    self.binary(type, text)
        types = [OIDS[type] if declared or form == "binary" else 0 for type, _, declared in sets[0]]
        result = self.pg.prepare(name, sql.encode(), types)
        if result.status not in OK:
            return [self._answer(result)]
        answers = []
        for values in sets:
            formats = [int(form == "binary" or (form == "mixed" and OIDS[v[0]] == t)) for v, t in zip(values, types)]
            data = [None if text is None else self.binary(type, text) if binary else text.encode()
                    for (type, text, _), binary in zip(values, formats)]
            answers.append(self._answer(self.pg.exec_prepared(name, data, formats)))
            if answers[-1].error and self.failed:
                break
        if not self.failed:
            self.simple(f"DEALLOCATE {name.decode()}")
        return answers

    def sql_prepare(self, sql, sets, literals):
        """PREPARE and EXECUTE as SQL. `literals`: of each set, the arguments as SQL."""
        self.serial += 1
        name, types = f"p{self.serial}", ", ".join(type if declared else "unknown" for type, _, declared in sets[0])
        answers = [self.simple(f"PREPARE {name}{f'({types})' if types else ''} AS {sql}")]
        if answers[0].error:
            return answers
        for arguments in literals:
            answers.append(self.simple(f"EXECUTE {name}" + (f"({', '.join(arguments)})" if arguments else "")))
            if self.failed:
                return answers
        self.simple(f"DEALLOCATE {name}")
        return answers

    def function(self, sql, sets, literals, step):
        """Runs `sql` inside a plpgsql function whose arguments p1, p2, .. are the parameters, in the form of the step:
        in a loop; `guarded`: in a block whose errors become a row; `fetching`: by an explicit cursor; `executed`: as text
        with parameters $1, $2, .."""
        self.serial += 1
        name, arguments = f"pg_temp.f{self.serial}", ", ".join(f"p{i + 1} {v[0]}" for i, v in enumerate(sets[0]))
        if step.form == "executed":
            using = ", ".join(f"p{i + 1}" for i in range(len(sets[0])))
            sql = f"EXECUTE $sql${sql}$sql${' USING ' + using if using else ''}"
        body = f"FOR found_row IN {sql} LOOP RETURN NEXT found_row::text; END LOOP;" if step.has_rows else \
            f"{sql}; GET DIAGNOSTICS row_number = ROW_COUNT; RETURN NEXT row_number::text;"
        if step.form == "fetching" and step.kind == "query":
            body = (f"OPEN c FOR {sql}; LOOP FETCH c INTO found_row; EXIT WHEN NOT FOUND; RETURN NEXT found_row::text; END LOOP;"
                    " CLOSE c;")
        if step.form == "guarded":
            body = f"BEGIN {body} EXCEPTION WHEN integrity_constraint_violation THEN RETURN NEXT left(SQLSTATE, 2); END;"
        answers = [self.simple(
            f"CREATE OR REPLACE FUNCTION {name}({arguments}) RETURNS SETOF text LANGUAGE plpgsql AS $body$\n"
            f"DECLARE found_row record; row_number bigint; c refcursor; BEGIN {body} END $body$")]
        if answers[0].error:
            return answers
        for each in literals:
            answers.append(self.simple(f"SELECT * FROM {name}({', '.join(each)}) AS f"))
            answers[-1].rows = [(_RECORD_ZEROS.sub(r"\1\2", row),) for row, in answers[-1].rows]
            if self.failed:
                return answers
        self.simple(f"DROP FUNCTION {name}")
        return answers

    def cursor(self, sql, total):
        """Reads through a cursor, in pieces, inside a transaction of its own unless there is one. `total`: the order of
        the rows is defined, so that pieces can be compared, backward too."""
        own, kind = self.idle, "SCROLL CURSOR" if total else "CURSOR"
        if own:
            self.simple("BEGIN")
        answers = [self.simple(f"DECLARE c {kind} FOR {sql}")]
        pieces = []
        for direction in ("3", "BACKWARD 2", "4", "LAST", "ABSOLUTE 2", "ALL") if total else ("3", "7", "ALL"):
            if not answers[-1].error:
                pieces.append(self.simple(f"FETCH {direction} FROM c"))
                answers += pieces[-1:] if pieces[-1].error or total else []
        if not answers[-1].error:
            rows = [row for piece in pieces for row in piece.rows]
            answers.append(Answer(None, "", f"FETCHED {len(rows)}", pieces[0].columns, rows))
            self.simple("CLOSE c")
        if own:
            self.simple("ROLLBACK")
        return answers

    def held(self, sql, total):
        """Reads through a cursor that outlives its transaction; inside a transaction as `cursor`."""
        if not self.idle:
            return self.cursor(sql, total)
        self.simple("BEGIN")
        answers, pieces = [self.simple(f"DECLARE c {'SCROLL ' if total else ''}CURSOR WITH HOLD FOR {sql}")], []
        for each in ("FETCH 3 FROM c", "COMMIT", "FETCH 2 FROM c", "FETCH BACKWARD 4 FROM c" if total else "FETCH 4 FROM c", "FETCH ALL FROM c"):
            if not answers[-1].error:
                pieces.append(self.simple(each))
                answers += pieces[-1:] if pieces[-1].error or total else []
        if answers[-1].error:
            self.simple("ROLLBACK")
        else:
            found = [piece for piece in pieces if piece.tag.startswith("FETCH")]
            rows = [row for piece in found for row in piece.rows] if not total else found[-1].rows
            answers.append(Answer(None, "", f"HELD {len(rows)}", found[0].columns, rows))
        self.simple("CLOSE ALL")
        return answers

    def copy_in(self, sql, data):
        result = self.pg.exec_(sql.encode())
        if result.status != pq.ExecStatus.COPY_IN:
            return self._answer(result)
        self.pg.put_copy_data(data.encode())
        self.pg.put_copy_end()
        return self._drain()

    def copy_out(self, sql):
        result = self.pg.exec_(sql.encode())
        if result.status != pq.ExecStatus.COPY_OUT:
            return self._answer(result)
        rows = []
        while True:
            size, data = self.pg.get_copy_data(1)
            if size == 0:
                self._wait()
                continue
            if size < 0:
                break
            rows.append((bytes(data).decode(),))
        answer = self._drain()
        answer.rows = rows
        return answer

    def _wait(self):
        """Waits for the server without keeping the interpreter from other threads, one of which may be a proxy."""
        select.select([self.pg.socket], [], [])
        self.pg.consume_input()

    def _settled(self):
        while self.pg.is_busy():
            self._wait()
        return True

    def _drain(self):
        answer = Answer()
        while self._settled() and (result := self.pg.get_result()) is not None:
            if not answer.error:
                answer = self._answer(result)
        return answer
