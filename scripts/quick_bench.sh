#!/bin/sh
# The quick benchmark of Jan's mlx-server: quick_bench.sh [PORT] [REQUESTS] [TOKENS], one request at a time.
exec python3 -m mlx_tandem bench serve --url "http://127.0.0.1:${1:-8080}" --endpoint chat --mode base \
    --concurrency 1 --repeats 1 --num-requests "${2:-10}" --max-tokens "${3:-100}"
