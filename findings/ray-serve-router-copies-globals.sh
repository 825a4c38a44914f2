#!/usr/bin/env bash
# Ray Serve 2.60.0: a request router reads copies of its module's globals, in the process that imported the module.
#
# Guess: request_router_class="module:Class" imports the module where the router is made, as an import path does, so
# that the router and a deployment in the same process share the module's state.
# Seen: Serve pickles the class by value where the application is deployed, although the module can be imported. The
# router's methods see the globals as they were then: what the ingress appends to a list of the module stays unseen,
# and the class is another one than module.Class. An import inside of a method finds the real module.
# Hurt: a router that tells its process which replicas there are, or shares an index with it, says nothing, without an
# error.
# Versions: Python 3.11, ray[serve] 2.60.0. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "ray[serve]==2.60.0"
cat >"$folder/shared_state.py" <<'END'
import importlib

from ray.serve.request_router import RequestRouter

SEEN = []


class Watching(RequestRouter):
    async def choose_replicas(self, candidate_replicas, pending_request=None):
        module = importlib.import_module("shared_state")
        module.REPORT = {"global": SEEN, "module": module.SEEN, "same class": type(self) is module.Watching}
        return [candidate_replicas]
END
cat >"$folder/main.py" <<'END'
import ray
import shared_state
from ray import serve
from ray.serve.config import RequestRouterConfig


@serve.deployment(
    request_router_config=RequestRouterConfig(request_router_class="shared_state:Watching"),
    ray_actor_options={"num_cpus": 0},
)
class Answering:
    def __call__(self):
        return 1


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Ingress:
    def __init__(self, handle):
        self.handle = handle
        shared_state.SEEN.append("the ingress")

    async def report(self):
        await self.handle.remote()
        return shared_state.REPORT


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
found = serve.run(Ingress.bind(Answering.bind())).report.remote().result()
print(f"ray {ray.__version__}: {found}")
serve.shutdown()
assert found == {"global": [], "module": ["the ingress"], "same class": False}, "the behaviour has changed"
END
cd "$folder"
RAY_USAGE_STATS_ENABLED=0 RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 PYTHONPATH="$folder" venv/bin/python main.py
