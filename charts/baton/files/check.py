"""`helm test`: the operator is ready, and the API server takes an InferenceService with its defaults."""

import json
import ssl
import sys
import time
import urllib.request
from pathlib import Path

operator, namespace = sys.argv[1:]
until = time.monotonic() + 120
while True:  # `helm install` does not wait for the operator
    try:
        with urllib.request.urlopen(f"{operator}/readyz", timeout=30) as answer:
            print("The operator is ready:", answer.read().decode().strip())
        break
    except OSError as error:
        if time.monotonic() > until:
            sys.exit(f"The operator is not ready after 120 s, {operator}/readyz: {error}")
        time.sleep(0.5)

account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
service = {
    "apiVersion": "baton.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"generateName": "test-"},
    "spec": {"model": {"uri": "builtin://smollm2"}, "decode": {}},
}
request = urllib.request.Request(
    f"https://kubernetes.default.svc/apis/baton.dev/v1alpha1/namespaces/{namespace}/inferenceservices?dryRun=All",
    data=json.dumps(service).encode(),
    headers={
        "Authorization": "Bearer " + (account / "token").read_text(),
        "Content-Type": "application/json",
    },
)
tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
with urllib.request.urlopen(request, timeout=30, context=tls) as answer:
    taken = json.load(answer)
assert taken["spec"]["router"]["replicas"] >= 1, taken
print("An InferenceService is taken, with its defaults filled in.")
