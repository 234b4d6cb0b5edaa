"""`make experiments`: starts a cluster, runs the experiments, draws the charts."""

import os
import sys

from cluster import Cluster

from .files import Console
from .run import SERVER_SETTINGS, run
from .settings import Settings


def main():
    settings = Settings.from_environment()
    from .charts import draw  # matplotlib takes a while, and is there for this program only
    settings.results.mkdir(parents=True, exist_ok=True)
    say = Console(settings.results / "console.log")
    with Cluster(shards=0, pg=os.environ.get("PG"), coordinator_settings=SERVER_SETTINGS,
                 shard_settings=SERVER_SETTINGS) as cluster:
        say(f"Postgres {cluster.psql('SHOW server_version')}: a coordinator, and a server with the shards' databases")
        run(settings, cluster, say)
    for chart in draw(settings.results):
        say(f"drew {chart}")


if __name__ == "__main__":
    sys.exit(main())
