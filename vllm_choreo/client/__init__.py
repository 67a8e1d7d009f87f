# SPDX-License-Identifier: Apache-2.0
r"""Choreography over HTTP: a session on a server, with the methods of `Choreography`.

    $ vllm serve MODEL --plugin choreo --api-key secret

    from vllm_choreo import ChoreoClient

    turn = "<|im_start|>{}\n{}<|im_end|>\n".format
    with ChoreoClient("http://127.0.0.1:8000", api_key="secret") as c:
        facts = c.prefill(
            [{"tokens": turn("user", text)} for text in ("The shed is green.", "Anna is old.")]
        )
        header = turn("user", "What colour is the shed?") + "<|im_start|>assistant\n"
        brief = {"temperature": 0, "max_tokens": 16}
        answer = c.decode(header, parents=facts, sampling_params=brief)
        print(answer.generated_text, answer.usage)

The same program runs on `Choreography(llm)`, but for the dict: sampling parameters may be
`vllm.SamplingParams` in both. Needs httpx and msgspec, and neither vllm nor torch.
`AsyncChoreoClient` is the twin of `AsyncChoreography`, with `submit` and `stream_decode`.

How a client differs, for there is a network between:

- A request that may have reached the engine is never repeated. If there is no answer the error is a
  `ServerError`, whose `may_have_run` says whether the calls may have run. The server ends the calls
  of a client that goes away, and keeps nothing of them.
- The server closes a session that nobody uses for `ttl_seconds`, and it has limits: calls on such a
  session raise `UnknownSessionError`, those beyond a limit `LimitError`, and `EngineRestartedError`
  says that the messages are gone.
- `deny` learns with the next call that a message does not exist.
- `metrics.submitted` is on the client's clock; `waiting`, `ttft` and `latency` are the server's,
  without the network.
- `message.provenance` is not at hand: ask the server by `c.provenance(message)`. The numbers of
  `stats` are the server's, and others.
- Requests that are under way at once may arrive in any order: to name a parent before it is
  complete, `submit` it, or give both calls names (`save_as`) and send them as one list.
"""

from vllm_choreo.client.asynchronous import AsyncChoreoClient, PendingAnswer
from vllm_choreo.client.failures import ServerError
from vllm_choreo.client.sync import ChoreoClient
from vllm_choreo.wire.messages import Logprob

__all__ = ["AsyncChoreoClient", "ChoreoClient", "Logprob", "PendingAnswer", "ServerError"]
