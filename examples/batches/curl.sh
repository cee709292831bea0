#!/bin/sh
# A batch by curl: upload, create, ask until it has ended, and read the answers.
#
#     sh examples/batches/curl.sh http://127.0.0.1:8000
set -eu
url="${1:-http://127.0.0.1:8000}"
folder="$(mktemp -d)"
trap 'rm -r "$folder"' EXIT

field() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p"; }

model="$(curl -fsS "$url/v1/models" | tr '{' '\n' | field id | head -n 1)"
for number in 1 2 3; do
  printf '{"custom_id": "request-%s", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "%s", "max_tokens": 32, "messages": [{"role": "user", "content": "Say %s in words."}]}}\n' \
    "$number" "$model" "$number"
done > "$folder/requests.jsonl"

file="$(curl -fsS "$url/v1/files" -F purpose=batch -F "file=@$folder/requests.jsonl" | field id)"
batch="$(curl -fsS "$url/v1/batches" -H 'content-type: application/json' \
  -d "{\"input_file_id\": \"$file\", \"endpoint\": \"/v1/chat/completions\", \"completion_window\": \"24h\"}" | field id)"
echo "batch: $batch"

status=validating
while [ "$status" != completed ] && [ "$status" != failed ]; do
  sleep 1
  curl -fsS "$url/v1/batches/$batch" > "$folder/batch.json"
  status="$(field status < "$folder/batch.json")"
  echo "status: $status"
done

output="$(field output_file_id < "$folder/batch.json")"
curl -fsS "$url/v1/files/$output/content"
