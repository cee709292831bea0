#!/bin/sh
# A batch by Baton's own command: one line waits for its end with a progress bar, another fetches the answers.
#
#     sh examples/batches/command_line.sh http://127.0.0.1:8000 requests.jsonl
set -eu
url="${1:-http://127.0.0.1:8000}"
requests="${2:?Which file of requests?}"

batch="$(baton batch submit "$requests" --endpoint /v1/chat/completions --url "$url")"
baton batch watch "$batch" --url "$url" # Ctrl-C leaves the batch running; the same line comes back to it
baton batch download "$batch" --url "$url" --to answers.jsonl
