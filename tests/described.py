"""Write models.json again from its configurations: `python -m tests.described`."""

import json

from kvlab.bill.data import HERE, table
from kvlab.bill.describe import describe


def described(entry: dict) -> dict:
    """An entry of models.json whose figures come from its configuration."""
    from transformers import AutoConfig

    values = dict(entry["config"])
    given = {key: entry[key] for key in ("config", "bits", "sources", "unverified")}
    return given | describe(AutoConfig.for_model(values.pop("model_type"), **values), entry["bits"])


def lines(value, depth: int = 0) -> str:
    """JSON with one line for everything that holds no table of its own."""
    if not isinstance(value, dict) or not any(isinstance(item, dict) for item in value.values()):
        return json.dumps(value, ensure_ascii=False)
    inner = ",\n".join(
        f"{' ' * (depth + 1)}{json.dumps(key)}: {lines(item, depth + 1)}" for key, item in value.items()
    )
    return f"{{\n{inner}\n{' ' * depth}}}"


if __name__ == "__main__":
    models = table("models")
    models["models"] = {name: described(entry) for name, entry in models["models"].items()}
    (HERE / "models.json").write_text(lines(models) + "\n", encoding="utf-8")
