# The extension in the stock Postgres 16 image: docker build -t pg_shardmap . && docker run -e POSTGRES_PASSWORD=... pg_shardmap
# Then, in a database: CREATE EXTENSION pg_shardmap CASCADE;

FROM rust:1.95-slim AS rust

# Built on the image that it will run on, so that headers, C library and server agree.
FROM postgres:16 AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc git libc6-dev libclang-dev postgresql-server-dev-16 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=rust /usr/local/rustup /usr/local/rustup
COPY --from=rust /usr/local/cargo /usr/local/cargo
ENV RUSTUP_HOME=/usr/local/rustup CARGO_HOME=/usr/local/cargo PATH=/usr/local/cargo/bin:$PATH PGRX_HOME=/pgrx
RUN cargo install cargo-pgrx --version =0.18.1 --locked
RUN mkdir /pgrx && printf '[configs]\npg16 = "/usr/lib/postgresql/16/bin/pg_config"\n' > /pgrx/config.toml
WORKDIR /source
COPY . .
RUN cargo pgrx package --pg-config /usr/lib/postgresql/16/bin/pg_config --no-default-features --features pg16 \
    --out-dir /package

# The package holds usr/lib/postgresql/16/lib and usr/share/postgresql/16/extension.
FROM postgres:16
COPY --from=build /package/usr/ /usr/
USER postgres
CMD ["postgres", "-c", "shared_preload_libraries=pg_shardmap"]
