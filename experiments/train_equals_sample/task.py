"""Policy gradients on an engine's samples: does training give a sampled token the probability that it was sampled with?

Each step samples completions of a few prompts, scores them, and takes one step on the clipped objective of PPO
(Schulman et al., arXiv:1707.06347, section 3) with advantages within a prompt's completions (Shao et al.,
arXiv:2402.03300, section 4.1). The samples are those of the weights that are trained, so that each ratio of
probabilities is 1 but for rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.figures import legend
from ksana_jax.lab.runs.tasks.base import INPUT_TEXTS, BaseTask, TrialContext, float_field, int_field
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, number, percent
from ksana_jax.lab.runs.tasks.row_figure import draw_means

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass
class TrainEqualsSampleSettings:
    """Fields of `settings` in the YAML file.

    texts: sources of the prompts, see `lab.runs.text_files`; empty takes the held-out files of the embedded model.
    exact: train on `LLM.logprobs_function`, which needs numerics "invariant", instead of `dense_logits`.
    num_steps: updates. num_prompts, num_samples: of each. prompt_tokens, output_tokens: of each sample.
    step_size: norm of a step, of a gradient with the norm 1.
    """

    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    exact: bool = True
    num_steps: int = int_field(20)
    num_prompts: int = int_field(4)
    num_samples: int = int_field(8, least=2)
    prompt_tokens: int = int_field(16)
    output_tokens: int = int_field(16)
    step_size: float = float_field(0.1, above=0)


class TrainEqualsSample(BaseTask):
    """Rewards tokens of lower-case letters alone."""

    Settings = TrainEqualsSampleSettings

    def max_model_len(self, settings: TrainEqualsSampleSettings) -> int:
        return settings.prompt_tokens + settings.output_tokens

    def check(self, config: Mapping[str, Any]) -> None:
        if config["settings"]["exact"] and config["engine"]["numerics"] != "invariant":
            raise ConfigError('settings.exact needs engine.numerics "invariant"')

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        import jax
        import jax.numpy as jnp

        from ksana_jax.loading import load_model
        from ksana_jax.models import dense_logits

        s, llm, rng = self.Settings(**trial.config["settings"]), trial.llm, np.random.default_rng(trial.seed)
        config, given = load_model(trial.config["model"])
        words = [llm.get_tokenizer().decode([i]) for i in range(config.vocab_size)]
        rewarded = np.array([word.strip().isalpha() and word.islower() for word in words])
        logprobs = llm.logprobs_function() if s.exact else functools.partial(_plain, dense_logits, config)

        def in_dtype(params):
            return jax.tree.map(lambda x: x.astype(llm.runner.params.final_norm.dtype), params)

        @jax.jit
        def update(params, tokens, sampled, advantages):
            def loss(params):
                own = slice(s.prompt_tokens - 1, -1)
                found = logprobs(in_dtype(params), tokens)[:, own]
                ratio = jnp.exp(
                    jnp.take_along_axis(found, tokens[:, s.prompt_tokens :, None], axis=-1)[..., 0] - sampled
                )
                clipped = jnp.clip(ratio, 0.8, 1.2)
                return -jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean(), ratio

            (_, ratio), gradient = jax.value_and_grad(loss, has_aux=True)(params)
            norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
            return jax.tree.map(lambda x, g: x - s.step_size * g / jnp.maximum(norm, 1e-6), params, gradient), ratio

        params = jax.tree.map(lambda x: x.astype(jnp.float32), given)
        try:
            for step in range(s.num_steps):
                llm.update_weights(in_dtype(params))
                seed = int(rng.integers(2**31))
                prompts = texts.prompts_for(llm, s.texts, s.num_prompts, s.prompt_tokens, seed)
                asked = SamplingParams(
                    n=s.num_samples,
                    seed=seed,
                    max_tokens=s.output_tokens,
                    temperature=1.0,
                    logprobs=0,
                    ignore_eos=True,
                    detokenize=False,
                )
                rows = [
                    (o.prompt_token_ids, c)
                    for o in llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked)
                    for c in o.outputs
                ]
                tokens = np.array([[*prompt, *completion.token_ids] for prompt, completion in rows], np.int32)
                sampled = np.array(
                    [[d[i].logprob for i, d in zip(c.token_ids, c.logprobs or (), strict=True)] for _, c in rows],
                    np.float32,
                )
                reward = rewarded[tokens[:, s.prompt_tokens :]].mean(axis=1).reshape(s.num_prompts, -1)
                spread = reward.std(axis=1, keepdims=True)
                advantages = ((reward - reward.mean(axis=1, keepdims=True)) / (spread + 1e-6)).ravel()
                params, ratio = update(params, tokens, sampled, advantages.astype(np.float32))
                off = np.abs(np.asarray(ratio) - 1)
                yield {
                    "metric": "step",
                    "step": step,
                    "reward": float(reward.mean()),
                    "equal": float((off == 0).mean()),
                    "worst": float(off.max()),
                }
                trial.progress((step + 1) / s.num_steps)
        finally:
            llm.update_weights(in_dtype(given))

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        steps = [m for m in measurements if m["metric"] == "step"]
        last, found = steps[-5:], {f"reward_{m['step']}": m["reward"] for m in steps}
        return found | {
            "equal": float(np.mean([m["equal"] for m in steps])),
            "worst": max(m["worst"] for m in steps),
            "first": steps[0]["reward"],
            "reward": float(np.mean([m["reward"] for m in last])),
        }

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("equal", "ratios that are 1, %", percent(1), "max"),
            Column("worst", "largest |ratio − 1|", lambda value: f"{value:.1e}", "min"),
            Column("first", "reward at first", number(2)),
            Column("reward", "reward of the last 5 steps", number(2)),
        ]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        axes = figure.subplots()
        for index, row in enumerate(row for row in rows if row.trials):
            steps = range(len(row.trials[0]))
            draw_means(axes, steps, [(row, f"reward_{n}") for n in steps], index, row.name)
        axes.set_xlabel("update")
        axes.set_ylabel("share of rewarded tokens")
        legend(figure, axes)


def _plain(dense_logits: Any, config: Any, params: Any, tokens: Any) -> Any:
    import jax

    return jax.nn.log_softmax(dense_logits(params, tokens, config=config))
