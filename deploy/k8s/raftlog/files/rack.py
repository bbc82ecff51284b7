import json
import os
import ssl
import urllib.request

account = "/var/run/secrets/kubernetes.io/serviceaccount"
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
host = f"[{host}]" if ":" in host else host
node, label = os.environ["NODE_NAME"], os.environ["NODE_LABEL"]
with open(f"{account}/token") as token:
    request = urllib.request.Request(
        f"https://{host}:{port}/api/v1/nodes/{node}", headers={"Authorization": f"Bearer {token.read().strip()}"}
    )
context = ssl.create_default_context(cafile=f"{account}/ca.crt")
with urllib.request.urlopen(request, context=context, timeout=20) as answer:
    labels = json.load(answer)["metadata"].get("labels", {})
if label not in labels:
    raise SystemExit(f"node {node} has no label {label}: set rack.nodeLabel to one that all nodes have")
with open("/run/raftlog/rack", "w") as rack:
    rack.write(labels[label])
print(f"rack {labels[label]}")
