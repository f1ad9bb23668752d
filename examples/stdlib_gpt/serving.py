"""Serving handler of the model: continues a prompt."""

DEFAULTS = {"prompt": "", "bytes": 64, "temperature": 0, "seed": 0}
MOST = 1000


class Continue:
    """A sample is an object with `prompt`, a text, and if need be `bytes`, `temperature` and `seed`.

    `temperature` 0 takes the likeliest byte each time. The answer has the bytes as numbers and as text.
    """

    def __init__(self, module, signature):
        self.model = module.eval()

    def decode(self, sent):
        if not isinstance(sent, dict) or "prompt" not in sent or sent.keys() - DEFAULTS.keys():
            raise ValueError(f"a sample is an object with `prompt`, and of {', '.join(DEFAULTS)} only")
        sample = {**DEFAULTS, **sent}
        kinds = {"prompt": str, "bytes": int, "temperature": (int, float), "seed": int}
        for name, value in sample.items():
            if not isinstance(value, kinds[name]) or isinstance(value, bool):
                raise ValueError(f"{name}: {value!r:.40} is of another type")
        if not 0 < sample["bytes"] <= MOST or sample["temperature"] < 0 or not 0 <= sample["seed"] < 2**63:
            raise ValueError(f"`bytes` is from 1 to {MOST}, `temperature` and `seed` are not negative")
        return sample

    def alike(self, sample):
        return id(sample)

    def predict(self, samples):
        return [self.answer(**one) for one in samples]

    def answer(self, prompt, bytes, temperature, seed):
        found = self.model.continued(prompt.encode(), bytes, temperature=temperature, seed=seed)
        return {"text": found.decode(errors="replace"), "bytes": list(found)}

    def encode(self, result):
        return result
