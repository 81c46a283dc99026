"""The latency model of one vLLM instance: seconds for a prefill, a decode step, an iteration, an answer.

Two families of methods:

* `paper_*`: the equations of Xiong et al., arXiv 2504.15303, always from k1..k8. A batch of B requests of I
  input tokens is prefilled in `k1*B*I + k2*B + k3*I + k4`; a decode step of B requests with c cached tokens
  each takes `k5*B*c + k6*B + k7*c + k8`. The policies `paper` and `paper-memory` and static search use them.
* all others: the best form that the profile has.

Times are seconds, lengths tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hetlb.balancer.core.pickle_by_fields import PickleByFields, check_numbers

if TYPE_CHECKING:
    from hetlb.balancer.core.step_times import DecodeTable, LaunchTime, MixedTerm, PnormPrefill, SplitKv

#: Factor on the attention part of decodes that share an iteration with prefill work.
MIXED_DECODE_ATTENTION_FACTOR: Final = 1.5
#: Most parts of a prompt that are computed one by one. If there are more, each counts as the mean part.
_EXACT_PARTS: Final = 8.0


Form = TypeVar("Form", bound=PickleByFields)


def scaled(form: Form, factor: float) -> Form:
    """Return the same form, every duration multiplied by `factor`."""
    own: Any = form
    times: dict[str, Any] = {}
    for each in fields(own):
        value = getattr(form, each.name)
        if each.name == "seconds":
            times[each.name] = tuple([seconds * factor for seconds in value])
        elif each.name.endswith("_s"):
            times[each.name] = value * factor
    found: Form = replace(own, **times)
    return found


@dataclass(frozen=True, slots=True)
class LatencyModel(PickleByFields):
    """The eight constants k1..k8 and, where the profile has them, better forms.

    `host_s` is the host's time for every iteration beyond the points that were fitted (0 if these hold
    it already), and `host_sequence_s` more for each sequence in it; `request_s` is what the server does with
    a request before its engine has it (HTTP, tokenizer). Units: seconds, tokens, requests. `batch` counts
    decoding sequences, `kv_tokens` the tokens that they hold in the KV cache together, the one computed in
    this step included.
    """

    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    k6: float
    k7: float
    k8: float
    better_prefill: PnormPrefill | None = None
    better_decode: DecodeTable | None = None
    mixed: MixedTerm | None = None
    host_s: float = 0.0
    host_sequence_s: float = 0.0
    request_s: float = 0.0
    split_kv: SplitKv | None = None
    launch: LaunchTime | None = None

    def __post_init__(self) -> None:
        constants = (self.k1, self.k2, self.k3, self.k4, self.k5, self.k6, self.k7, self.k8)
        for index, value in enumerate(constants, 1):
            if not math.isfinite(value):
                raise ValueError(f"k{index}: expected a finite number, got {value}")
        check_numbers(self, 0.0, "host_s", "host_sequence_s", "request_s")

    def __hash__(self) -> int:
        """Return a hash of the constants alone: models that differ only in a better form are rare."""
        return hash((self.k1, self.k2, self.k4, self.k5, self.k6, self.k8, self.host_s))

    # --- the paper's equations: k1..k8 ---

    def paper_prefill_s(self, batch: float, input_tokens: float) -> float:
        """Return seconds to prefill `batch` requests of `input_tokens` tokens each in one forward pass."""
        return self.k1 * batch * input_tokens + self.k2 * batch + self.k3 * input_tokens + self.k4

    def paper_step_s(self, batch: float, cached_tokens: float) -> float:
        """Return the seconds of one decode step of `batch` requests with `cached_tokens` tokens each."""
        return self.k5 * batch * cached_tokens + self.k6 * batch + self.k7 * cached_tokens + self.k8

    def paper_decode_s(self, batch: float, input_tokens: float, output_tokens: float) -> float:
        """Return the seconds to decode `output_tokens` for each of `batch` requests of `input_tokens`.

        The closed form of `sum over j = 1..O of paper_step_s(B, I + j)`; O may be fractional, since a
        predicted length is an expectation.
        """
        cached_sum = output_tokens * input_tokens + output_tokens * (output_tokens + 1.0) / 2.0
        return output_tokens * (self.k6 * batch + self.k8) + (self.k5 * batch + self.k7) * cached_sum

    # --- one iteration ---

    def host_of_s(self, sequences: float) -> float:
        """Return the host's seconds in an iteration with `sequences`, beyond the fitted points' own."""
        return self.host_s + self.host_sequence_s * sequences

    def step_line(self, batch: float) -> tuple[float, float]:
        """Return (seconds of a decode step of `batch` sequences, seconds for each token that they hold)."""
        if batch <= 0.0:
            return 0.0, 0.0
        host_s = self.host_of_s(batch)
        better = self.better_decode
        if better is not None:
            own_s, token_s = better.step_line(batch)
            return host_s + own_s, token_s
        return host_s + self.k6 * batch + self.k8, self.k5 + self.k7 / batch

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Return the seconds of one decode step. Affine in `kv_tokens` at a fixed batch."""
        own_s, token_s = self.step_line(batch)
        return own_s + token_s * kv_tokens

    def mixed_step_s(
        self,
        prefill_tokens: float,
        prompts: float,
        longest: float,
        batch: float,
        kv_tokens: float,
        attended: float = -1.0,
    ) -> float:
        """Return the seconds of one iteration: prompt tokens, and one token for each decoding sequence.

        `prefill_tokens` of `prompts` prompts are computed, at most `longest` of one. `attended` is what
        attention goes over: the sum of c * (c + 2 * o) over the parts of prompts, c tokens behind o
        computed or cached ones; below 0: `prefill_tokens * longest`. It is at least `step_s`.
        """
        if prefill_tokens <= 0.0:
            return self.step_s(batch, kv_tokens)
        if attended < 0.0:
            attended = prefill_tokens * longest
        better, mixed, launch = self.better_prefill, self.mixed, self.launch
        host_s = self.host_of_s(prompts + batch)
        # One block of threads runs through a context alone, however few tokens attend to it.
        chain_s = mixed.chain_s((attended / prefill_tokens + longest) / 2.0) if mixed is not None else 0.0
        if batch <= 0.0:
            if better is not None:
                seconds = better.pass_s(prefill_tokens, prompts, attended, 0.0, 0.0, 0.0, chain_s)
            else:
                seconds = self._paper_pass_s(prefill_tokens, prompts, longest) + self.k4
            seconds += host_s
            return seconds if launch is None else launch.pass_s(seconds, prefill_tokens)
        if mixed is None:
            # A profile without mixed steps: the attention of decodes is multiplied by an assumed factor.
            decodes_s = self.k5 * kv_tokens + self.k7 * kv_tokens / batch
            decodes_s *= MIXED_DECODE_ATTENTION_FACTOR
            floor_s = self.k6 * batch + self.k8
        else:
            decodes_s = mixed.seconds(prefill_tokens, batch, kv_tokens)
            floor_s = 0.0
        if better is not None:
            seconds = better.pass_s(prefill_tokens, prompts, attended, batch, floor_s, decodes_s, chain_s)
        else:
            least_s = self.k4 if self.k4 > self.k8 else self.k8
            seconds = least_s + self._paper_pass_s(prefill_tokens, prompts, longest) + decodes_s
            if mixed is None:
                seconds += self.k6 * batch
        seconds += host_s
        if launch is not None:
            seconds = launch.pass_s(seconds, prefill_tokens + batch)
        if mixed is None:
            return seconds
        step_s = self.step_s(batch, kv_tokens)
        return seconds if seconds > step_s else step_s

    def _paper_pass_s(self, tokens: float, prompts: float, longest: float) -> float:
        """Return the seconds that prompt tokens add to a pass, by k1..k3."""
        return self.k1 * tokens + self.k2 * prompts + self.k3 * longest

    # --- one request ---

    def joining_s(self, running_step_s: float, asynchronous: bool = True) -> float:
        """Return expected seconds from when a server with room gets a request until it computes its prompt.

        Half of the running iteration (`running_step_s`, 0 on an idle engine) is left on average, and with
        asynchronous scheduling the next one is already fixed.
        """
        return self.request_s + (1.5 if asynchronous else 0.5) * running_step_s

    @property
    def least_token_s(self) -> float:
        """Seconds that each prompt token takes at least, whatever runs beside it."""
        better = self.better_prefill
        if better is not None:
            return better.least_token_s
        rising = self.k1 >= 0.0 and self.k2 >= 0.0 and self.k3 >= 0.0
        return self.k1 if rising and (self.k4 >= 0.0 or self.k8 >= 0.0) else 0.0

    @property
    def least_pass_s(self) -> float:
        """Seconds that a pass over prompts takes at least, however few tokens it has."""
        better = self.better_prefill
        if better is not None:
            return better.least_pass_s
        return self.k4 if self.k4 > 0.0 and self.least_token_s > 0.0 else 0.0

    def prefill_s(self, prompt_tokens: float, sequences: float = 1.0, cached_tokens: float = 0.0) -> float:
        """Return seconds to prefill `sequences` prompts in one pass, `cached_tokens` of each not computed."""
        new = prompt_tokens - cached_tokens
        attended = sequences * new * (new + 2.0 * cached_tokens)
        return self.mixed_step_s(sequences * new, sequences, new, 0.0, 0.0, attended)

    def first_token_s(
        self,
        prompt_tokens: float,
        cached_tokens: float,
        pending_tokens: float,
        batch: float,
        kv_tokens: float,
        budget: float,
        sequences: float = 1.0,
    ) -> float:
        """Return the seconds after `joining_s` until the first token of prompts of `prompt_tokens` tokens.

        `cached_tokens` of each are in the prefix cache. `pending_tokens` of other prompts, taken to be like
        these, are prefilled first; `batch` sequences decode beside them. An iteration computes at most
        `budget` tokens (`max_num_batched_tokens`), decodes included.
        """
        new = prompt_tokens - cached_tokens
        if new < 1.0:
            new = 1.0
        cached = prompt_tokens - new
        own = sequences * new
        total = pending_tokens + own
        part = budget - batch if budget - batch >= 1.0 else 1.0
        per_token = (own * (new + 2.0 * cached) + pending_tokens * prompt_tokens) / total
        if total <= part:
            return self.mixed_step_s(total, sequences, new, batch, kv_tokens, total * per_token)
        full = math.ceil(total / part) - 1.0
        done = full * part
        alone = own >= total and sequences <= 1.0
        full_s = 0.0
        # One prompt alone: its parts attend to all before them.
        if alone and self.mixed is not None and full <= _EXACT_PARTS:
            i = 0.0
            while i < full:
                behind = part * (part + 2.0 * (cached + i * part))
                full_s += self.mixed_step_s(part, 1.0, part, batch, kv_tokens, behind)
                i += 1.0
        else:
            attended = part * (done + 2.0 * cached) if alone else part * per_token
            full_s = full * self.mixed_step_s(part, 1.0, part, batch, kv_tokens, attended)
        last = total - done
        attended = last * (last + 2.0 * (cached + done)) if alone else last * per_token
        prompts = sequences if sequences * new <= last else last / new if last > new else 1.0
        longest = new if new < last else last
        return full_s + self.mixed_step_s(last, prompts, longest, batch, kv_tokens, attended)

    def reading_s(
        self, tokens: float, prompts: float, batch: float, kv_tokens: float, budget: float
    ) -> float:
        """Return the seconds to prefill `tokens` of about `prompts` prompts beside `batch` that decode."""
        each = tokens / prompts if prompts > 1.0 else tokens
        return self.first_token_s(each, 0.0, tokens - each, max(0.0, batch), kv_tokens, budget)

    def answer_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the seconds to decode `output_tokens` behind a prompt, beside nothing."""
        return output_tokens * self.step_s(1.0, prompt_tokens + (output_tokens + 1.0) / 2.0)

    # --- cost of one more request for the running ones (the externality) ---

    def read_delay_s(
        self, prompt_tokens: float, cached_tokens: float, batch: float, kv_tokens: float, budget: float
    ) -> float:
        """Return the seconds that prefilling a prompt delays each of `batch` decoding sequences."""
        if batch <= 0.0:
            return 0.0
        read_s = self.first_token_s(prompt_tokens, cached_tokens, 0.0, batch, kv_tokens, budget)
        new = max(1.0, prompt_tokens - cached_tokens)
        return delay_of_reading_s(read_s, new, batch, self.step_s(batch, kv_tokens), budget)

    def scaled(self, factor: float) -> LatencyModel:
        """Return the same engine, every duration multiplied by `factor`."""
        host_s, request_s = self.host_s * factor, self.request_s * factor
        return self.with_factors(factor, factor, factor, host_s, request_s, self.host_sequence_s * factor)

    def with_factors(
        self,
        prefill: float,
        mixed: float,
        decode: float,
        host_s: float,
        request_s: float,
        host_sequence_s: float,
    ) -> LatencyModel:
        """Return the model with factors on its parts, and these times of the host."""
        better, table, term, split = self.better_prefill, self.better_decode, self.mixed, self.split_kv
        return LatencyModel(
            k1=self.k1 * prefill,
            k2=self.k2 * prefill,
            k3=self.k3 * prefill,
            k4=self.k4 * prefill,
            k5=self.k5 * decode,
            k6=self.k6 * decode,
            k7=self.k7 * decode,
            k8=self.k8 * decode,
            better_prefill=None if better is None else scaled(better, prefill),
            better_decode=None if table is None else scaled(table, decode),
            mixed=None if term is None else scaled(term, mixed),
            host_s=host_s,
            host_sequence_s=host_sequence_s,
            request_s=request_s,
            split_kv=None if split is None else scaled(split, decode),
            launch=None if self.launch is None else scaled(self.launch, mixed),
        )


def delay_of_reading_s(read_s: float, tokens: float, batch: float, step_s: float, budget: float) -> float:
    """Return the delay of each of `batch` decoding sequences by reading `tokens` of prompts, in seconds.

    Reading takes `read_s`. The delay is less, since every sequence makes a step (`step_s`) in each of the
    iterations that read.
    """
    part = budget - batch if budget - batch >= 1.0 else 1.0
    delay_s = read_s - math.ceil(tokens / part) * step_s
    return delay_s if delay_s > 0.0 else 0.0


#: Model of an instance without a profile until it has shown its speed: an 8B model at bf16 on
#: one 80 GB card, rounded. Only ratios between instances matter to a placement, and `core.speed`
#: corrects the factor from the first answers on.
DEFAULT_LATENCY = LatencyModel(k1=4e-5, k2=5e-4, k3=0.0, k4=1e-2, k5=3e-8, k6=3e-5, k7=0.0, k8=1e-2)


def ideal_batch(
    kv_cache_tokens: int, input_tokens: float, output_tokens: float, max_num_seqs: int | None
) -> int:
    """Return copies of one request that fill the KV cache: `max(1, floor(kv / (I + O)))`, capped.

    Xiong et al., arXiv 2504.15303; the cap `max_num_seqs` is vLLM's own limit on a batch.
    """
    tokens = input_tokens + output_tokens
    fit = int(kv_cache_tokens / tokens) if tokens > 0 else kv_cache_tokens
    if max_num_seqs is not None and fit > max_num_seqs:
        fit = max_num_seqs
    return max(1, fit)


def processing_s(model: LatencyModel, batch: int, input_tokens: float, output_tokens: float) -> float:
    """Return one request's share of the seconds of its ideal batch: `(T_prefill(b) + T_decode(b)) / b`."""
    total = model.paper_prefill_s(batch, input_tokens)
    if output_tokens > 0:
        total += model.paper_decode_s(batch, input_tokens, output_tokens)
    return total / batch


def mixed_term(k: LatencyModel) -> MixedTerm:
    """Return the mixed term, or the rule of `mixed_step_s` for a profile without mixed steps, as a term."""
    if k.mixed is not None:
        return k.mixed
    from hetlb.balancer.core.step_times import MixedTerm

    factor = MIXED_DECODE_ATTENTION_FACTOR
    sequence_s = k.k6 if k.better_prefill is None else 0.0
    return MixedTerm(max(0.0, sequence_s), 0.0, max(0.0, factor * k.k5), max(0.0, factor * k.k7))


def corrected(
    k: LatencyModel,
    prefill: float = 1.0,
    mixed: float = 1.0,
    decode: float = 1.0,
    host_s: float = 0.0,
    request_s: float = 0.0,
) -> LatencyModel:
    """Return the model with factors on its parts, and seconds more of the host per iteration and request."""
    host_s += k.host_s
    if mixed != 1.0:
        k = replace(k, mixed=mixed_term(k))
    request_s = max(0.0, k.request_s + request_s)
    found = k.with_factors(prefill, mixed, decode, max(0.0, host_s), request_s, k.host_sequence_s)
    table = found.better_decode
    if host_s < 0.0:
        # If the host takes less time than the profile says, the steps get shorter by the difference.
        found = replace(found, k8=max(0.1 * found.k8, found.k8 + host_s))
    if table is not None and host_s < 0.0:
        least_s = 0.1 * table.seconds[0]
        seconds = tuple([max(least_s, each + host_s) for each in table.seconds])
        found = replace(found, better_decode=replace(table, seconds=seconds))
    return found
