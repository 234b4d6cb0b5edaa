"""The pages for users are true: their SQL runs, prints what they say it prints, and fails where they say it fails.

Each page has a fresh coordinator database and one psql session, in which its blocks run from top to bottom:

    ```sql        runs; an error fails the test
    ```sql error  must fail, with the error that the ```text block after it holds
    ```sh         runs in an empty folder, with PGHOST, PGPORT, PGUSER and PGDATABASE of the coordinator
    ```text       what the block before it prints; a line of three dots stands for any lines
    ```sql skip, ```sh skip   are not run

White space, the lines under headings, row counts and contexts of errors do not count. `host => '10.0.0.N', dbname => 'app'` in a
page means an empty database that belongs to user app (password secret), who is no superuser. The shards ask users of the
pages for their passwords, as shards should.
"""

import os
import pathlib
import re
import subprocess

import psycopg
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.M | re.S)
KINDS = {"sql", "sql error", "sql skip", "sh", "sh skip", "text"}
ADDRESS = re.compile(r"host => '10\.0\.0\.(?P<number>\d+)', dbname => 'app'")

PASSWORDS = "host all app,alice all scram-sha-256\n"

# What a page takes for granted: README's reader has a table and no extension yet.
BEFORE = {"README": "CREATE TABLE objects (file_key text, id bigint, PRIMARY KEY (file_key, id)); INSERT INTO objects VALUES ('f1', 1), ('f2', 2)"}


def blocks(page):
    return [(match["kind"], match["body"]) for match in FENCE.finditer(page.read_text())]


def normal(output):
    """The lines that count, each with single spaces."""
    lines = (" ".join(line.split()) for line in output.splitlines())
    return [line for line in lines if line and not re.fullmatch(r"[-+]+|\(\d+ rows?\)", line)]


def matches(expected, found):
    """Whether the lines are as expected, where "..." stands for any number of lines."""
    pattern = "".join("(?:.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in expected)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in found)) is not None


class Site:
    """What a page runs on: its database, further ones at 10.0.0.N, and all that has to go again."""

    def __init__(self, cluster, page, folder):
        self.cluster, self.page, self.folder = cluster, page, folder
        self.name = "docs_" + page.stem.lower()
        self.servers = {cluster.coordinator, *cluster.shard_servers}
        self.before = {server: self._state(server) for server in self.servers}

    @staticmethod
    def _state(server):
        """Databases and roles of a server."""
        found = server.psql("SELECT 'DATABASE ' || quote_ident(datname) || ' WITH (FORCE)' FROM pg_database "
                            "UNION ALL SELECT 'ROLE ' || quote_ident(rolname) FROM pg_roles")
        return set(found.splitlines())

    def spare(self, number):
        return f"{self.name}_spare_{number}"

    def set_up(self):
        shards = self.cluster.shard_server(0)
        self.ask_for_passwords(True)
        numbers = {match["number"] for match in ADDRESS.finditer(self.page.read_text())}
        if numbers:
            shards.psql("CREATE ROLE app LOGIN PASSWORD 'secret'")
        for number in numbers:
            shards.psql(f"CREATE DATABASE {self.spare(number)} OWNER app")
        if self.page.stem in BEFORE:
            self.cluster.coordinator.psql(f"CREATE DATABASE {self.name}")
            self.cluster.psql(BEFORE[self.page.stem], self.name)
        else:
            self.cluster.new_database(self.name)

    def ask_for_passwords(self, asked):
        for server in self.cluster.shard_servers:
            file = server.data / "pg_hba.conf"
            rules = file.read_text().removeprefix(PASSWORDS)
            file.write_text((PASSWORDS if asked else "") + rules)
            server.reload()

    def tear_down(self):
        self.ask_for_passwords(False)
        for server in self.servers:
            for thing in sorted(self._state(server) - self.before[server]):  # databases before roles
                server.psql(f"DROP {thing}")

    def run(self):
        """What each block printed."""
        script = ["\\set SHOW_CONTEXT never\n"]
        address = f"host => '127.0.0.1', port => {self.cluster.shard_server(0).port}, dbname => '{self.name}_spare_"
        for number, (kind, body) in enumerate(blocks(self.page)):
            script.append(f"\\echo <block {number}>\n")
            if kind in ("sql", "sql error"):
                script.append(ADDRESS.sub(lambda match: f"{address}{match['number']}'", body))
            elif kind == "sh":
                file = self.folder / f"{number}.sh"
                file.write_text(body)
                script.append(f"\\! sh -eu {file} 2>&1 || echo 'ERROR: the script failed'\n")
        binaries = self.cluster.coordinator.bin
        environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "PGHOST": "127.0.0.1",
                       "PGPORT": str(self.cluster.coordinator.port), "PGUSER": "postgres", "PGDATABASE": self.name}
        done = subprocess.run([binaries / "psql", "-Xq"], input="".join(script), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False, env=environment, cwd=self.folder)
        return re.split(r"^<block \d+>\n", done.stdout, flags=re.M)[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(shared_cluster, page, tmp_path):
    site = Site(shared_cluster, page, tmp_path)
    try:
        site.set_up()
        printed = site.run()
    finally:
        site.tear_down()
    parts = blocks(page)
    assert len(printed) == len(parts), f"psql ended early:\n{printed[-1]}"
    faults = []
    for number, (kind, body) in enumerate(parts):
        found = normal(printed[number])
        after = parts[number + 1] if number + 1 < len(parts) else ("", "")
        expected = normal(after[1]) if after[0] == "text" else None
        failed = any(re.match("(ERROR|FATAL|PANIC):", line) for line in found)
        if kind == "sql error":
            wrong = not failed or expected is None or not matches(["...", *expected, "..."], found)
        else:
            wrong = failed or (expected is not None and "skip" not in kind and not matches(expected, found))
        if wrong:
            faults.append("\n".join([f"--- block {number}: {kind}", body, "--- expected", *(expected or []), "--- found", *found]))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_form_of_page(page):
    """Fences that nobody would run, and pages that nobody would read to the end."""
    parts = blocks(page)
    assert {kind for kind, _ in parts} <= KINDS
    assert page.read_text().count("\n```") == 2 * len(parts), "a fence is not closed"
    assert page == README or any(kind == "sql" for kind, _ in parts)
    assert len(page.read_text().splitlines()) <= 160


def test_readme_links_every_page():
    links = set(re.findall(r"\]\((docs/[^)]+)\)", README.read_text()))
    assert links == {str(page.relative_to(ROOT)) for page in PAGES if page != README}


def test_every_setting_is_explained(shared_cluster):
    """docs/operations.md has a row for each setting."""
    with psycopg.connect(shared_cluster.dsn("app")) as conn:
        settings = {name for name, in conn.execute("SELECT name FROM shardmap.settings")}
    assert set(re.findall(r"^\| `(shardmap\.\w+)` \|", (ROOT / "docs/operations.md").read_text(), re.M)) == settings


def test_every_administrative_function_is_explained(shared_cluster):
    """Each function that administrators call by name stands on a page."""
    text = "".join(page.read_text() for page in PAGES)
    with psycopg.connect(shared_cluster.dsn("app")) as conn:
        names = {name for name, in conn.execute(
            "SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'shardmap'::regnamespace AND p.proname !~ '^(_|hash_)'")}
    internal = {"fdw_handler", "fdw_validator", "keep_here", "publish_map", "invalidate_caches", "copy_rows_to_shards", "check_key_column", "key_sql",
                "random_tokens", "balanced_tokens"}
    assert {name for name in names - internal if name not in text} == set()
