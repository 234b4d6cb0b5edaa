#!/usr/bin/env bash
# Figures of the core crate: lookup, build, balance. Needs no server.
cargo run --quiet --release -p shardmap_core --example figures
