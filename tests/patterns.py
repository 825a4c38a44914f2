"""Attention patterns that engine, XLA reference and kernels are all tested with. A new kind of pattern goes here."""

from ksana_jax import AttentionPattern

WINDOW = 12
PATTERNS = {
    "full": AttentionPattern(),
    "sliding": AttentionPattern(window=WINDOW),
    "dilated": AttentionPattern(window=WINDOW, stride=3),
    "dilated with sinks": AttentionPattern(window=WINDOW, stride=2, num_sinks=1, sink_position="absolute"),
    "global": AttentionPattern(window=WINDOW, global_every=10),
    "sinks at absolute positions": AttentionPattern(window=WINDOW, num_sinks=3, sink_position="absolute"),
    "StreamingLLM": AttentionPattern(window=WINDOW, num_sinks=3, sink_position="cache"),
    "StreamingLLM, sinks over a block's edge": AttentionPattern(window=WINDOW, num_sinks=9, sink_position="cache"),
    "LM-Infinite": AttentionPattern(window=WINDOW, num_sinks=4, sink_position="ceiling"),
    "LM-Infinite, high ceiling": AttentionPattern(window=WINDOW, num_sinks=4, sink_position="ceiling", sink_ceiling=30),
    "LM-Infinite, low ceiling": AttentionPattern(window=WINDOW, num_sinks=4, sink_position="ceiling", sink_ceiling=5),
}
# Repositioned sinks, at most.
MAX_ROTATED_SINKS = max(p.num_repositioned_sinks for p in PATTERNS.values())
