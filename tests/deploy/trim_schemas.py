"""Writes `schemas.json`: of custom resources' published schemas, what our manifests use.

    python tests/deploy/trim_schemas.py LWS KUBERAY      # clones of the two repositories

A field that the published schema lacks has no entry, and an object takes no others.
"""

import json
import subprocess
import sys
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
SOURCES = {
    "mesh/leaderworkerset.yaml": (
        "kubernetes-sigs/lws",
        "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
    ),
    "ray/raycluster.yaml": (
        "ray-project/kuberay",
        "helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml",
    ),
}
KEPT = ("type", "enum", "pattern", "minimum", "maximum", "minItems", "maxItems", "required")


def trimmed(schema, values):
    """Returns what a schema says of values, as JSON Schema of draft 2020-12."""
    found = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]} | {k: v for k, v in found.items() if k != "type"}
    if "properties" in schema:
        used = {key for value in values for key in value}
        found["properties"] = {
            key: trimmed(schema["properties"][key], [v[key] for v in values if key in v])
            for key in sorted(used & schema["properties"].keys())
        }
        found["additionalProperties"] = False
    elif isinstance(own := schema.get("additionalProperties"), dict):
        found["additionalProperties"] = trimmed(
            own, [v for value in values for v in value.values()]
        )
    if "items" in schema:
        found["items"] = trimmed(schema["items"], [v for value in values for v in value])
    return found


def main(*clones):
    made = {}
    for (name, (repository, path)), clone in zip(SOURCES.items(), clones, strict=True):

        def git(*words, clone=clone):
            return subprocess.run(["git", "-C", clone, *words], check=True, capture_output=True)

        crd = yaml.safe_load(git("show", f"HEAD:{path}").stdout)
        manifest = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
        group, version = manifest["apiVersion"].split("/")
        assert (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (group, manifest["kind"])
        (own,) = (v for v in crd["spec"]["versions"] if v["name"] == version and v["served"])
        commit = git("rev-parse", "HEAD").stdout.decode().strip()
        said = trimmed(own["schema"]["openAPIV3Schema"], [manifest])
        said["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
        made[name] = {"$comment": f"{repository} {commit[:12]} {path}, Apache-2.0"} | said
    out = Path(__file__).with_name("schemas.json")
    out.write_text(json.dumps(made, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
