"""Holds deploy/kubernetes to the schemas of Kubernetes, and the pool to the form of the Inference Extension's v1.

Core objects are checked with kubernetes-validate, which brings Kubernetes' own schemas. The pool's kind is not among them;
what its definition requires is written down here.
"""

import pathlib
import re
import subprocess
import sys

import jsonschema
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
PORT = {"type": "object", "required": ["number"], "additionalProperties": False, "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}}}
POOL = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "inference.networking.k8s.io/v1"},
        "spec": {
            "type": "object",
            "required": ["selector", "targetPorts", "endpointPickerRef"],
            "additionalProperties": False,
            "properties": {
                "selector": {
                    "type": "object",
                    "required": ["matchLabels"],
                    "additionalProperties": False,
                    "properties": {"matchLabels": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}},
                },
                "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": PORT},
                "endpointPickerRef": {
                    "type": "object",
                    "required": ["name", "port"],
                    "additionalProperties": False,
                    "properties": {
                        "group": {"type": "string"},
                        "kind": {"type": "string"},
                        "name": {"type": "string", "minLength": 1},
                        "port": PORT,
                        "failureMode": {"enum": ["FailOpen", "FailClose"]},
                    },
                },
            },
        },
    },
}


def main():
    core = [path for path in sorted(FOLDER.glob("*.yaml")) if path.name != "inferencepool.yaml"]
    validate = pathlib.Path(sys.executable).with_name("kubernetes-validate")
    subprocess.run([validate, "--strict", *core], check=True)
    pool = yaml.safe_load((FOLDER / "inferencepool.yaml").read_text())
    jsonschema.validate(pool, POOL)

    # What belongs together has the same names.
    objects = {(o := yaml.safe_load(path.read_text()))["kind"]: o for path in core}
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (objects["Service"]["spec"]["selector"], pool["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items(), selector
    assert objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["ports"][0]["containerPort"] == pool["spec"]["targetPorts"][0]["number"]

    # The metrics that the scaler asks for are served, and the flags exist.
    served = (ROOT / "crates/server/src/metrics.rs").read_text()
    for metric in objects["HorizontalPodAutoscaler"]["spec"]["metrics"]:
        name = metric["pods"]["metric"]["name"].removeprefix("lapidary_")
        assert f'"{name}"' in served, name
    source = (ROOT / "crates/cli/src/commands/serve.rs").read_text() + (ROOT / "crates/cli/src/model_args.rs").read_text()
    for flag in container["args"]:
        name = re.match(r"--([a-z-]+)=", flag)[1].replace("-", "_")
        assert f"pub {name}:" in source, name
    print("manifests: passed")


if __name__ == "__main__":
    main()
