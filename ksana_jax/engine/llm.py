"""The public class `LLM`: turns prompts into requests and runs the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from ksana_jax.core import checks, vllm_names
from ksana_jax.core.lora import LoRARequest
from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.request import SamplingParams
from ksana_jax.engine.completion import Request
from ksana_jax.engine.embedding import Embeds
from ksana_jax.engine.loaded_model import LoadedModel
from ksana_jax.engine.progress import progress_bar
from ksana_jax.engine.prompts import Prompt, read_requests
from ksana_jax.engine.sessions import Sessions
from ksana_jax.tokenizers import Tokenizer
from ksana_jax.tokenizers.chat import Messages, chat_prompts

_GENERATE_KEYWORDS = {"prompts", "sampling_params", "prompt_token_ids", "use_tqdm", "lora_request"}


class LLM(LoadedModel, Sessions, Embeds):
    """Runs a model on the paged engine; names as in vLLM.

    Args:
      model: its path (a Hugging Face directory or a .gguf file) or name: a shipped model such as "ksana-tiny", one that
        `ksana fetch` gets, or one of the Hugging Face hub, in full "org/name@revision/file.gguf". Files that the hub's
        cache lacks are downloaded. See docs/use/models.md.
      revision, gguf_file: the same as in the name: `LLM("org/name", revision="v1")` is `LLM("org/name@v1")`.
      pattern: attention pattern: an `AttentionPattern`, its fields as a dict, a preset's name such as "streaming_llm"
        (`methods.presets`), or a list with one per layer; None takes the model's own.
      load_format: "auto", or "dummy" for random weights.
      tokenizer: a tokenizer, or the path or name of a model that has one; None takes the model's, if it has one.
      settings: fields of `EngineConfig`: dtype, block_size, num_blocks, max_model_len, max_num_seqs, ... vLLM's names
        such as gpu_memory_utilization work too, see docs/use/coming-from-vllm.md.

    Raises:
      ValueError: the model or a setting is invalid; the message says which and why.
    """

    def generate(
        self,
        prompts: Prompt | Seq[Prompt] | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prompt_token_ids: Seq[int] | Seq[Seq[int]] | None = None,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Several threads may call this and `stream` at once; their requests then share steps.

        Args:
          prompts: a text, token ids, {"prompt": text}, {"prompt_token_ids": [...]}, or a list of them. A dict may have
            "question" or "question_token_ids" too: `kv_eviction` compresses the prompt before the question is read.
          sampling_params: one for all prompts, or one per prompt; None takes the defaults.
          prompt_token_ids: the prompts, if all of them are token ids.
          use_tqdm: draw a progress bar on standard error.
          lora_request: an adapter for all prompts, or one or None per prompt; needs `enable_lora`.
          others: refused, with the nearest keyword.

        Returns:
          One output per prompt, in order.

        Raises:
          ValueError: a request can never be served; then none of this call is served, and other requests continue.
          RuntimeError: a failure in a step of another thread or stream has ended the requests.
        """
        if others:
            vllm_names.refuse_unknown("LLM.generate", others, _GENERATE_KEYWORDS)
        checks.require(checks.boolean("use_tqdm", use_tqdm))
        asked = prompts, sampling_params, prompt_token_ids, lora_request
        requests, outputs = self._make_requests(*asked, streams=False), {}
        with progress_bar(requests) if use_tqdm else contextlib.nullcontext() as bar:
            for output in self._serving.serve(requests):
                if output.finished:
                    outputs[output.request_id] = output
                if bar is not None:
                    bar()
        return [outputs[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        delta: bool = False,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Completes prompts, and yields a request's output so far whenever it has grown.

        Requests that are unfinished when the reader stops are aborted.

        Args:
          prompts, sampling_params, lora_request: as in `generate`.
          delta: yield only new text, token_ids and log-probabilities since the request's last output, in time
            proportional to their length; complete outputs, copied at each token, take quadratic time.
        """
        requests = self._make_requests(prompts, sampling_params, None, lora_request, streams=True)
        return self._serving.serve(requests, Request.take_delta if delta else Request.output)

    def chat(
        self,
        messages: Messages | Seq[Messages],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Completes conversations, each a list of {"role": ..., "content": ...}, through the model's chat template.

        Args:
          options: chat_template, chat_template_kwargs, add_generation_prompt, continue_final_message and tools, as in
            `render_chat`; calls of tools in an answer stay text.
        """
        prompts = chat_prompts(messages, self.tokenizer, options, "LLM.chat")
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
          ValueError: this model has none.
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer")
        return self.tokenizer

    def chat_prompts(self, messages: Messages | Seq[Messages], **options: Any) -> list[dict[str, Any]]:
        """Formats conversations, with the options of `chat`, as prompts for `generate` and `stream`."""
        return chat_prompts(messages, self.tokenizer, options, "LLM.chat_prompts")

    def _make_requests(self, prompts, params, prompt_token_ids, lora_request, *, streams: bool) -> list[Request]:
        asked = read_requests(prompts, params, prompt_token_ids, self.tokenizer, lora_request, streams=streams)
        return self._serving.new_requests(asked)
