"""The routing experiments: what one shard costs and what all shards cost, by three routers. See docs/experiments.md."""
