"""llama.cpp through the C interface of llama-cpp-python. Runs in the environment that has it, a process a measurement.

    llama.py speed GGUF --threads T --prompt N --generate N [--depth N] [--repetitions N]
    llama.py start GGUF --threads T --text TEXT
    llama.py logits GGUF --threads T --ids IDS.json --from POSITION --output FILE.npy
    llama.py greedy GGUF --threads T --ids IDS.json --generate N --output FILE.npz
"""

import argparse
import ctypes
import json
import sys
import time


def resident() -> tuple[int, int]:
    """Bytes of memory that the process has, and that it had at most."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


class Model:
    """A loaded model with one sequence."""

    def __init__(self, path: str, threads: int, context: int, batch: int = 512):
        # Here and not above, so that whoever measures memory or time knows what they were without it.
        import llama_cpp

        self.c = llama_cpp
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self.keep = silent
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            sys.exit(f"llama.cpp does not load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = batch
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        # Sliding layers keep their window, not the whole context, as ours do.
        params.swa_full = False
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit(f"llama.cpp makes no context of {context} for {path}")
        self.batch = batch
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def clear(self):
        """Forgets the sequence."""
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def feed(self, ids):
        """Runs tokens in batches; the last one of each has logits."""
        for first in range(0, len(ids), self.batch):
            part = ids[first : first + self.batch]
            tokens = (self.c.llama_token * len(part))(*part)
            code = self.c.llama_decode(self.context, self.c.llama_batch_get_one(tokens, len(part)))
            if code:
                sys.exit(f"llama_decode ended with {code}")
        self.c.llama_synchronize(self.context)

    def feed_for_logits(self, ids, first_position, wanted):
        """Runs tokens from a position on; yields the logits of positions for which `wanted` says so."""
        import numpy

        batch = self.c.llama_batch_init(self.batch, 0, 1)
        for first in range(0, len(ids), self.batch):
            part = ids[first : first + self.batch]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = first_position + first + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = wanted(first_position + first + i)
            code = self.c.llama_decode(self.context, batch)
            if code:
                sys.exit(f"llama_decode ended with {code}")
            for i in range(len(part)):
                if batch.logits[i]:
                    row = self.c.llama_get_logits_ith(self.context, i)
                    yield numpy.ctypeslib.as_array(row, (self.vocab_size,)).copy()
        self.c.llama_batch_free(batch)

    def tokenize(self, text: str):
        """Ids with one BOS."""
        raw = text.encode()
        ids = (self.c.llama_token * (len(raw) + 8))()
        n = self.c.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), True, False)
        return list(ids[: max(n, 0)])

    def best(self) -> int:
        """The most likely next token."""
        import numpy

        row = self.c.llama_get_logits_ith(self.context, -1)
        return int(numpy.ctypeslib.as_array(row, (self.vocab_size,)).argmax())


def some_ids(model: Model, n: int):
    """The same ids as `lapidary bench` feeds."""
    return [(i * 7919 + 13) % model.vocab_size for i in range(n)]


def speed(o) -> dict:
    model = Model(o.model, o.threads, o.depth + max(o.prompt, o.generate * (o.repetitions + 1)) + 16)
    rates = {"prompt": [], "generate": []}
    for run in range(o.repetitions + 1 if o.prompt else 0):
        model.clear()
        ids = some_ids(model, o.prompt)
        start = time.perf_counter()
        model.feed(ids)
        if run > 0:
            rates["prompt"].append(o.prompt / (time.perf_counter() - start))
    if o.generate:
        model.clear()
        if o.depth:
            model.feed(some_ids(model, o.depth))
    for run in range(o.repetitions + 1 if o.generate else 0):
        if not o.depth:
            model.clear()
        model.feed([2])
        ids = some_ids(model, o.generate)
        start = time.perf_counter()
        for token in ids:
            model.feed([token])
        if run > 0:
            rates["generate"].append(o.generate / (time.perf_counter() - start))
    return rates


def start(o) -> dict:
    import llama_cpp  # noqa: F401  what the library itself takes is not the model's
    import numpy  # noqa: F401

    before, _ = resident()
    begin = time.perf_counter()
    model = Model(o.model, o.threads, 1024)
    # A vocabulary that was made up may know no piece of the text.
    model.feed(model.tokenize(o.text) or some_ids(model, 6))
    model.best()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "peak_bytes": resident()[1] - before}


def logits(o) -> dict:
    import numpy

    chunks = json.load(open(o.ids))
    model = Model(o.model, o.threads, max(map(len, chunks)) + 16)
    rows = []
    for ids in chunks:
        model.clear()
        rows += model.feed_for_logits(ids, 0, lambda position: position >= o.first)
    numpy.save(o.output, numpy.stack(rows))
    return {"rows": len(rows)}


def greedy(o) -> dict:
    """N most likely tokens after each prompt: `tokens` [prompts, N], and the logits that they were taken from."""
    import numpy

    prompts = json.load(open(o.ids))
    model = Model(o.model, o.threads, max(map(len, prompts)) + o.generate + 16)
    tokens, rows = [], []
    for ids in prompts:
        model.clear()
        feed, reply = ids, []
        for _ in range(o.generate):
            model.feed(feed)
            row = numpy.ctypeslib.as_array(model.c.llama_get_logits_ith(model.context, -1), (model.vocab_size,)).copy()
            rows.append(row)
            reply.append(int(row.argmax()))
            feed = reply[-1:]
        tokens.append(reply)
    shape = (len(prompts), o.generate, model.vocab_size)
    numpy.savez(o.output, tokens=numpy.array(tokens), logits=numpy.stack(rows).reshape(shape))
    return {"rows": len(rows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for run in (speed, start, logits, greedy):
        command = commands.add_parser(run.__name__)
        command.set_defaults(run=run)
        command.add_argument("model")
        command.add_argument("--threads", type=int, required=True)
        if run is speed:
            for name, default in (("prompt", 512), ("generate", 128), ("depth", 0), ("repetitions", 1)):
                command.add_argument(f"--{name}", type=int, default=default)
        elif run is start:
            command.add_argument("--text", required=True)
        else:
            command.add_argument("--ids", required=True)
            if run is logits:
                command.add_argument("--from", dest="first", type=int, default=0)
            else:
                command.add_argument("--generate", type=int, required=True)
            command.add_argument("--output", required=True)
    o = parser.parse_args()
    print(json.dumps(o.run(o)))


if __name__ == "__main__":
    main()
