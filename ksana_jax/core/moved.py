"""Modules under the names that they had before they moved, for plug-ins: importing one warns and gives the new module.

Goes away in 0.2.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# {old name: new name}, both inside `ksana_jax`; what is in a package moved with it.
MOVED = {
    "align": "lab.align",
    "bench": "lab.bench",
    "checks": "core.checks",
    "cluster": "engine.distributed",
    "cluster.connection": "engine.distributed.ray_connection",
    "cluster.places": "engine.distributed.ray_places",
    "compilation_cache": "core.compilation_cache",
    "compile_check": "devkit.compile_check",
    "config": "core.config",
    "devices.target": "core.device_setting",
    "draft_models": "engine.draft_models",
    "dtypes": "core.dtypes",
    "engine.changes": "engine.engine_lock",
    "engine.device_half": "engine.device_setup",
    "engine.following": "engine.distributed.worker",
    "engine.intake": "engine.request_factory",
    "engine.leading": "engine.distributed.driver",
    "engine.mailbox": "engine.output_buffer",
    "engine.open_requests": "engine.inflight",
    "engine.replicas": "engine.distributed.replicas",
    "engine.text_pool": "engine.tokenizer_threads",
    "engine.warming": "engine.warmup",
    "errors": "core.errors",
    "evaluation": "lab.evaluation",
    "experiments": "lab.experiments",
    "files": "core.files",
    "folder_lock": "core.folder_lock",
    "forks": "core.forks",
    "gguf_file": "core.gguf_file",
    "hosts": "engine.distributed",
    "hosts.setting": "core.hosts_setting",
    "inspect": "engine.inspect",
    "interrupts": "core.interrupts",
    "kv.codecs.floats": "methods.codecs.floats",
    "kv.codecs.gear": "methods.codecs.gear",
    "kv.codecs.kivi": "methods.codecs.kivi",
    "kv.codecs.kvquant": "methods.codecs.kvquant",
    "kv.codecs.packed": "methods.codecs.packed",
    "kv.codecs.scaled": "methods.codecs.scaled",
    "kv.eviction.h2o": "methods.eviction.h2o",
    "kv.eviction.keyformer": "methods.eviction.keyformer",
    "kv.eviction.knorm": "methods.eviction.knorm",
    "kv.eviction.noise": "methods.eviction.noise",
    "kv.eviction.oracle": "methods.eviction.oracle",
    "kv.eviction.random": "methods.eviction.random",
    "kv.eviction.snapkv": "methods.eviction.snapkv",
    "kv.eviction.tova": "methods.eviction.tova",
    "kv.eviction.vatp": "methods.eviction.vatp",
    "kv.eviction.window": "methods.eviction.window",
    "layer_spec": "core.layer_spec",
    "lazy": "core.lazy",
    "metrics": "core.metrics",
    "operator_settings": "core.operator_settings",
    "parallel": "sharding",
    "pattern_presets": "methods.presets",
    "patterns": "core.patterns",
    "planner": "runner.planner",
    "plugins": "core.plugins",
    "probe": "devkit.device_check",
    "processor": "core.processor",
    "proxy": "serve.gateway",
    "recall": "lab.recall",
    "refusals": "core.refusals",
    "request": "core.request",
    "router": "serve.routing",
    "router.hashing": "kv.prefix_hashing",
    "sequence": "scheduler.sequence",
    "server": "serve.server",
    "shipped": "core.shipped",
    "simulator": "lab.simulator",
    "sources": "core.sources",
    "speculative": "scheduler.speculative",
    "speculative.draft_tree": "methods.proposers.draft_tree",
    "speculative.goodput": "scheduler.speculative.draft_length",
    "speculative.jacobi": "methods.proposers.jacobi",
    "speculative.ngram": "methods.proposers.ngram",
    "speculative.shared_tries": "methods.proposers.shared_tries",
    "speculative.suffix": "methods.proposers.suffix",
    "speculative.trie": "methods.proposers.trie",
    "speculative.trie_proposer": "methods.proposers.trie_proposer",
    "speculative.tries": "methods.proposers.tries",
    "step": "scheduler.step",
    "step.contract": "scheduler.step.types",
    "trace": "lab.trace",
    "training": "lab.training",
    "units": "core.units",
    "vllm_flags": "cli.vllm_flags",
    "vllm_names": "core.vllm_names",
    "workload": "serve.workload",
}


def new_name(module: str) -> str | None:
    """Returns the present name of a module; None if it has not moved."""
    package, _, name = module.partition(".")
    if package != "ksana_jax":
        return None
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if new := MOVED.get(".".join(parts[:end])):
            return ".".join((package, new, *parts[end:]))
    return None


class Moved(MetaPathFinder, Loader):
    """Finds moved modules by their old names; installed by `ksana_jax`."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if new_name(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_name(spec.name)
        assert new
        module = import_module(new)
        warnings.warn(f"{spec.name} is {new} now; the old name goes away in 0.2", DeprecationWarning, stacklevel=2)
        # The import system sets attributes of the module that it loads: give it an alias, not the module in use.
        alias = ModuleType(spec.name, module.__doc__)
        alias.__dict__.update({name: value for name, value in vars(module).items() if not name.startswith("__")})
        alias.__dict__["__getattr__"] = lambda name: getattr(module, name)
        alias.__path__ = []  # so that modules inside it are looked for, here
        return alias

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the new module has already run."""


def install() -> None:
    """Makes old names importable, after all other ways to find a module."""
    sys.meta_path.append(Moved())
