#!/bin/sh
# Baton through curl: models, chat, stream, tool, structured output, embeddings, errors.
#
#     examples/clients/curl.sh http://127.0.0.1:8000/v1 [MODEL]
#
# Prints one line per answer: what was asked for, the HTTP status, the body (of a stream: its last events).
set -eu

base=${1:-http://127.0.0.1:8000/v1}
question='[{"role": "user", "content": "List 3 countries and their capitals."}]'

ask() { # NAME PATH [BODY]
  name=$1 path=$2
  shift 2
  if [ $# -gt 0 ]; then
    set -- --header 'Content-Type: application/json' --data "$1"
  fi
  printf '%s: ' "$name"
  curl --silent --show-error --noproxy '*' --max-time 120 --header 'Authorization: Bearer EMPTY' \
    --write-out '\n%{http_code}' "$@" "$base$path" |
    awk 'NF { if (last != "") body = body (body == "" ? "" : " ") last; last = $0 } END { print last " " body }'
}

echo "client: $(curl --version | head -n 1 | cut -d ' ' -f 1-2)"
ask model /models
model=${2:-$(curl --silent --noproxy '*' "$base/models" | sed 's/.*"id": *"\([^"]*\)".*/\1/')}

ask chat /chat/completions \
  '{"model": "'"$model"'", "messages": '"$question"', "temperature": 0, "max_tokens": 64}'

ask stream /chat/completions \
  '{"model": "'"$model"'", "messages": '"$question"', "temperature": 0, "max_tokens": 64, "stream": true}'

ask tool /chat/completions \
  '{"model": "'"$model"'", "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "max_tokens": 200, "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object",
      "properties": {"city": {"enum": ["Madrid", "Rome"]}}, "required": ["city"]}}}]}'

ask structured /chat/completions \
  '{"model": "'"$model"'", "messages": '"$question"', "max_tokens": 200,
    "response_format": {"type": "json_schema", "json_schema": {"name": "capital", "strict": true,
      "schema": {"type": "object", "properties": {"city": {"enum": ["Madrid", "Rome", "Paris"]},
        "country": {"enum": ["Spain", "Italy", "France"]}}, "required": ["city", "country"],
        "additionalProperties": false}}}}'

ask embeddings /embeddings '{"model": "'"$model"'", "input": ["a relay", "a baton"]}'

ask error /chat/completions '{"model": "nope", "messages": '"$question"'}'
ask error /chat/completions '{"model": "'"$model"'", "messages": '"$question"', "temperature": 9}'
