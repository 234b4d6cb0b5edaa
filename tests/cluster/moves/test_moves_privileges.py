"""Everybody sees how moves go; administrators also see primary keys of the rows that move."""

import psycopg
import pytest
from tenants import plan, run


def test_watermarks_are_for_administrators(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_batch:3=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    conn.execute("CREATE ROLE somebody; CREATE ROLE administrator IN ROLE shardmap_admin")
    try:
        conn.execute("SET ROLE somebody")
        assert conn.execute("SELECT state, rows_copied, watermark FROM shardmap.moves WHERE id = %s", (number,)).fetchone() == ("copying", 14, None)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SELECT watermark FROM shardmap.move_table")
        conn.execute("SET ROLE administrator")
        assert conn.execute("SELECT watermark FROM shardmap.moves WHERE id = %s", (number,)).fetchone() == ([str(tenant), "14"],)
    finally:
        conn.execute("RESET ROLE")
        conn.execute("DROP ROLE somebody; DROP ROLE administrator")
    run(conn, number)
