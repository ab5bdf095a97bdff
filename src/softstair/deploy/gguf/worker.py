"""Runs a file in llama.cpp, in a process of its own: where llama.cpp fails, it ends the process.

It is run as a script, with a job in JSON, and imports nothing of softstair.
"""

import json
import sys
import urllib.request
from array import array
from pathlib import Path
from typing import Any

import xllamacpp as x


def serve(path: str, context: int) -> Any:
    """Return a file in llama.cpp: one thread of the CPU, and a cache in float32."""
    params = x.CommonParams()
    params.model.path, params.n_ctx = path, context
    params.n_parallel, params.n_gpu_layers, params.fit_params = 1, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.verbosity, params.cache_ram_mib = False, 1, 0
    # Neither helps alone: flash attention rounds what it reads of any cache to fp16.
    params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return x.Server(params)


def complete(server: Any, tokens: list[int], count: int, **settings: Any) -> Any:
    """Return the answer to a request."""
    request = {"prompt": tokens, "max_tokens": count, "cache_prompt": True, **settings}
    reply = server.handle_completions(request)
    if "choices" not in reply:
        raise SystemExit(f"{reply.get('error', reply)}")
    return reply


def write_rows(server: Any, tokens: list[int], vocabulary: int, letter: int, out: Path) -> None:
    """Write the log-probabilities (T, vocabulary) of what follows each token, as float64.

    There is a request for each position, which draws the token ``letter``: after others llama.cpp
    returns no probabilities.
    """
    settings = {"n_probs": vocabulary, "logprobs": vocabulary, "post_sampling_probs": False}
    with open(out, "wb") as file:
        for place in range(len(tokens)):
            bias = [[letter, 1000.0]]
            reply = complete(server, tokens[: place + 1], 1, logit_bias=bias, **settings)
            entries = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            row = {entry["id"]: entry["logprob"] for entry in entries}
            array("d", [row[number] for number in range(vocabulary)]).tofile(file)


def main() -> None:
    """Do the job of the only argument, and print its result."""
    job = json.loads(sys.argv[1])
    server, result = serve(job["path"], job["context"]), None
    if "text" in job:
        data = json.dumps({"content": job["text"], "add_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", data)
        with urllib.request.urlopen(request) as reply:
            result = json.load(reply)["tokens"]
    elif "rows" in job:
        write_rows(server, job["tokens"], job["vocabulary"], job["letter"], Path(job["rows"]))
    else:
        reply = complete(server, job["tokens"], job["count"], ignore_eos=True)
        result = reply["timings"]["predicted_per_second"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
