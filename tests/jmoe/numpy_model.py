"""A whole MoE model in float64 loops, brownout included, read straight from a checkpoint's tensors.

Slow and plain on purpose: it shares no code with jmoe, and takes its plans from `plan_oracle`.
"""

import json

import numpy as np
import plan_oracle
from safetensors.numpy import load_file

from tests.jmoe.router_oracle import scored, softmax, sparsemixer


def silu(x):
    return x / (1 + np.exp(-x))


LFM2S = {
    "operator_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "embedding_norm.": "norm.",
    "self_attn.q_layernorm.": "self_attn.q_norm.",
    "self_attn.k_layernorm.": "self_attn.k_norm.",
    "self_attn.out_proj.": "self_attn.o_proj.",
    "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.": "mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}
"""What LFM2 calls otherwise."""
HUNYUANS = {
    "mlp.gate.wg.": "mlp.gate.",
    "mlp.router.gate.": "mlp.gate.",
    "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_mlp.": "mlp.shared_experts.",
    "self_attn.query_layernorm.": "self_attn.q_norm.",
    "self_attn.key_layernorm.": "self_attn.k_norm.",
}
"""What Hunyuan's models call otherwise."""
NEMOTRONS = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.": "model.",
    "norm_f.": "norm.",
}
"""What Nemotron-H calls otherwise; and `mixer`, what others call by what it is."""
BLOCKS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def apart(name, tensor, renamed=HUNYUANS):
    """Yields Qwen's names of a tensor, or of its parts: of Granite, one has all experts'."""
    for theirs, ours in renamed.items():
        name = name.replace(theirs, ours)
    at, is_mixer, what = name.partition(".mixer.")
    if is_mixer:
        yield from ((f"{at}.{own}.{what}", tensor) for own in ("mamba", "self_attn", "mlp"))
    layer, _, shared = name.partition(".shared_mlp.")
    if shared == "input_linear.weight":
        for gate_or_up, own in zip(("gate", "up"), np.split(tensor, 2), strict=True):
            yield f"{layer}.mlp.shared_experts.{gate_or_up}_proj.weight", own
    elif shared == "output_linear.weight":
        yield f"{layer}.mlp.shared_experts.down_proj.weight", tensor
    at, _, what = name.partition(".block_sparse_moe.")
    at += ".mlp."
    if what == "input_linear.weight":
        for number, (gate, up) in enumerate(np.split(own, 2) for own in tensor):
            yield f"{at}experts.{number}.gate_proj.weight", gate
            yield f"{at}experts.{number}.up_proj.weight", up
    elif what == "output_linear.weight":
        for number, down in enumerate(tensor):
            yield f"{at}experts.{number}.down_proj.weight", down
    elif what:
        renamed = {"router.layer": "gate", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        for theirs, ours in renamed.items():
            what = what.replace(f"{theirs}.weight", f"{ours}.weight")
        yield at + what, tensor
    else:
        yield name, tensor


class NumpyModel:
    """Default RoPE, and Hunyuan's. `gap` is the closest call any router made, `degraded` counts by
    row.
    """

    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors, self.united = {}, {}
        for path in sorted(directory.glob("model*.safetensors")):
            for name, tensor in load_file(path).items():
                others = {"lfm2_moe": LFM2S, "nemotron_h": NEMOTRONS}
                renamed = others.get(self.config["model_type"], HUNYUANS)
                self.tensors |= dict(apart(name, tensor.astype(np.float64), renamed))
        if (directory / "united.safetensors").exists():
            self.united = load_file(directory / "united.safetensors")
        self.cache, self.gap = {}, np.inf
        if self.config["model_type"] == "nemotron_h":
            own = self.config
            for name, theirs in (("n_heads", "mamba_num_heads"), ("n_groups", "n_groups")):
                own[f"mamba_{name}"] = own[theirs]
            own["mamba_d_state"] = own["ssm_state_size"]
            own |= {"rms_norm_eps": own["layer_norm_epsilon"], "position_embedding_type": "nope"}
            if letters := own.get("hybrid_override_pattern"):
                own["layers_block_type"] = [BLOCKS[letter] for letter in letters]

    def step(self, rows, strategy="zero", threshold=100, way=None):
        """Runs a step of rows (sequence, token, exempt); returns logits and degraded visits of each
        row.
        """
        cfg = self.config
        x = self.tensors["model.embed_tokens.weight"][[token for _, token, _ in rows]]
        x, scale = x * cfg.get("embedding_multiplier", 1), cfg.get("residual_multiplier", 1)
        if cfg.get("mup_enabled"):
            x = x * cfg["hidden_size"] ** 0.5
        four = cfg["model_type"] == "afmoe"  # norms a layer
        before_mlp = "pre_mlp_layernorm.weight" if four else "post_attention_layernorm.weight"
        degraded, moe_layer = np.zeros(len(rows), int), 0
        for number, kind in enumerate(cfg.get("layers_block_type", ())):
            h = self.norm(x, f"model.layers.{number}.norm.weight")
            if kind == "moe":
                out, moved = self.moe(number, moe_layer, h, rows, strategy, threshold, way)
                degraded, moe_layer = degraded + moved, moe_layer + 1
            elif kind == "mlp":
                out = self.mlp(f"model.layers.{number}.mlp.", h)
            else:
                mixer = self.mamba if kind == "linear_attention" else self.attention
                out = mixer(number, h, rows)
            x = x + out
        for layer in range(0 if "layers_block_type" in cfg else cfg["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            h = self.norm(x, at + "input_layernorm.weight")
            recurs = f"{at}linear_attn.A_log" in self.tensors
            convolves = f"{at}conv.conv.weight" in self.tensors
            mixer = self.delta if recurs else self.short_conv if convolves else self.attention
            mixer = self.mamba if f"{at}mamba.D" in self.tensors else mixer
            out = mixer(layer, h, rows)
            if four:
                out = self.norm(out, at + "post_attention_layernorm.weight")
            x = x + scale * out
            h = self.norm(x, at + before_mlp)
            if self.is_gpt_oss or f"{at}mlp.gate.weight" in self.tensors:
                out, moved = self.moe(layer, moe_layer, h, rows, strategy, threshold, way)
                degraded, moe_layer = degraded + moved, moe_layer + 1
            else:
                out = self.mlp(at + "mlp.", h)
            if four:
                out = self.norm(out, at + "post_mlp_layernorm.weight")
            x = x + scale * out
        tied = "lm_head.weight" not in self.tensors
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        logits = self.norm(x, "model.norm.weight") @ self.tensors[name].T
        logits = logits + self.tensors.get("lm_head.bias", 0.0)
        return logits / cfg.get("logits_scaling", 1), degraded

    def norm(self, x, name):
        eps = self.config.get("norm_eps") or self.config["rms_norm_eps"]
        if (bias := name.replace(".weight", ".bias")) in self.tensors:
            x = x - x.mean(-1, keepdims=True)
            return (
                x / np.sqrt(x.var(-1, keepdims=True) + eps) * self.tensors[name]
                + self.tensors[bias]
            )
        weight = self.tensors[name] + (self.is_qwen3_next and "linear_attn" not in name)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    def delta(self, layer, h, rows):
        """Runs Gated DeltaNet's rows, each over its sequence's state, head by head."""
        cfg, at = self.config, f"model.layers.{layer}.linear_attn."
        key_heads, heads, key, value, taps = (
            cfg[f"linear_{name}"]
            for name in (
                "num_key_heads",
                "num_value_heads",
                "key_head_dim",
                "value_head_dim",
                "conv_kernel_dim",
            )
        )
        group, out = heads // key_heads, np.zeros((len(rows), heads, value))
        kernel = self.tensors[at + "conv1d.weight"][:, 0]
        sizes = np.cumsum([key, key, group * value])
        for i, (sequence, _, _) in enumerate(rows):
            woven = self.linear(at + "in_proj_qkvz", h[i]).reshape(key_heads, -1)
            q, k, v, z = np.split(woven, sizes, axis=1)
            b, a = np.split(self.linear(at + "in_proj_ba", h[i]).reshape(key_heads, -1), 2, axis=1)
            inputs, state = self.cache.setdefault((sequence, layer), ([], []))
            inputs.append(np.concatenate([q.ravel(), k.ravel(), v.ravel()]))
            mixed = silu(sum(kernel[:, -1 - n] * x for n, x in enumerate(inputs[: -1 - taps : -1])))
            q, k, v = np.split(mixed, [key_heads * key, 2 * key_heads * key])
            for head in range(heads):
                part = slice(head // group * key, (head // group + 1) * key)
                query, own = (x[part] / np.sqrt(x[part] @ x[part] + 1e-6) for x in (q, k))
                rate = np.log1p(np.exp(a.ravel()[head] + self.tensors[at + "dt_bias"][head]))
                kept = np.exp(-np.exp(self.tensors[at + "A_log"][head]) * rate)
                before = kept * state[head] if len(state) == heads else np.zeros((key, value))
                new = v[head * value : (head + 1) * value] - own @ before
                after = before + np.outer(own, new / (1 + np.exp(-b.ravel()[head])))
                state[head : head + 1] = [after]
                out[i, head] = query * key**-0.5 @ after
            out[i] = self.norm(out[i], at + "norm.weight") * silu(z.reshape(heads, value))
        return self.linear(at + "out_proj", out.reshape(len(rows), -1))

    def mamba(self, layer, h, rows):
        """Runs Mamba-2's rows, each over its sequence's state, head by head."""
        cfg, at, outs = self.config, f"model.layers.{layer}.mamba.", []
        heads, groups, size = (cfg[f"mamba_{key}"] for key in ("n_heads", "n_groups", "d_state"))
        wide = len(self.tensors[at + "norm.weight"])
        value, kernel = wide // heads, self.tensors[at + "conv1d.weight"][:, 0]
        a = -np.exp(self.tensors[at + "A_log"])
        for i, (sequence, _, _) in enumerate(rows):
            ends = [wide, 2 * wide + 2 * groups * size]
            gate, x, dt = np.split(self.linear(at + "in_proj", h[i]), ends)
            inputs, state = self.cache.setdefault((sequence, layer), ([], []))
            inputs.append(x)
            seen = enumerate(inputs[: -1 - kernel.shape[1] : -1])
            mixed = sum(kernel[:, -1 - n] * one for n, one in seen)
            mixed = silu(mixed + self.tensors.get(at + "conv1d.bias", 0.0))
            x, b, c = np.split(mixed, [wide, wide + groups * size])
            dt, y = np.log1p(np.exp(dt + self.tensors[at + "dt_bias"])), np.zeros((heads, value))
            for head, own in enumerate(x.reshape(heads, value)):
                of_group = slice(head * groups // heads * size, (head * groups // heads + 1) * size)
                before = state[head] * np.exp(a[head] * dt[head]) if len(state) == heads else 0.0
                state[head : head + 1] = [before + np.outer(b[of_group], dt[head] * own)]
                y[head] = c[of_group] @ state[head] + self.tensors[at + "D"][head] * own
            y = (y.ravel() * silu(gate)).reshape(groups, -1)
            y = y / np.sqrt((y * y).mean(-1, keepdims=True) + cfg["rms_norm_eps"])
            outs.append(y.ravel() * self.tensors[at + "norm.weight"])
        return self.linear(at + "out_proj", np.stack(outs))

    def short_conv(self, layer, h, rows):
        """Runs rows over the newest ones of their sequences."""
        at, gates = f"model.layers.{layer}.conv.", []
        kernel, bias = self.tensors[at + "conv.weight"][:, 0], self.tensors.get(at + "conv.bias", 0)
        for i, (sequence, _, _) in enumerate(rows):
            before, gate, x = np.split(self.linear(at + "in_proj", h[i]), 3)
            inputs, _ = self.cache.setdefault((sequence, layer), ([], []))
            inputs.append(before * x)
            seen = inputs[: -1 - kernel.shape[1] : -1]
            gates.append(gate * (bias + sum(kernel[:, -1 - n] * x for n, x in enumerate(seen))))
        return self.linear(at + "out_proj", np.stack(gates))

    def linear(self, name, x):
        return x @ self.tensors[name + ".weight"].T + self.tensors.get(name + ".bias", 0.0)

    def mlp(self, at, x):
        if at + "gate_proj.weight" not in self.tensors:
            return self.linear(at + "down_proj", np.maximum(self.linear(at + "up_proj", x), 0) ** 2)
        return self.linear(
            at + "down_proj",
            silu(self.linear(at + "gate_proj", x)) * self.linear(at + "up_proj", x),
        )

    def attention(self, layer, h, rows):
        cfg, at = self.config, f"model.layers.{layer}.self_attn."
        heads, kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
        head_dim = cfg.get("head_dim") or cfg["hidden_size"] // heads
        of_scores = cfg.get("attention_multiplier", head_dim**-0.5)
        out = np.zeros((len(rows), heads, head_dim))
        gates = np.full_like(out, np.inf)  # open
        for i, (sequence, _, _) in enumerate(rows):
            keys, values = self.cache.setdefault((sequence, layer), ([], []))
            q, k, v = (self.linear(f"{at}{p}_proj", h[i]) for p in ("q", "k", "v"))
            if self.is_qwen3_next:
                q, gates[i] = np.split(q.reshape(heads, -1), 2, axis=1)
                q = q.ravel()
            if f"{at}gate_proj.weight" in self.tensors:
                gates[i] = self.linear(f"{at}gate_proj", h[i]).reshape(heads, -1)
            whole = cfg["model_type"] in ("olmoe", "minimax_m2")  # norms all heads together
            if whole:
                q, k = self.norm(q, at + "q_norm.weight"), self.norm(k, at + "k_norm.weight")
            if clip := cfg.get("clip_qkv"):
                q, k, v = (np.clip(x, -clip, clip) for x in (q, k, v))
            q, k, v = (x.reshape(-1, head_dim) for x in (q, k, v))
            position, turned_first = len(keys), cfg["model_type"] == "hunyuan_v1_moe"
            if turned_first:
                q, k = (self.rotate(x, position, layer) for x in (q, k))
            if at + "q_norm.weight" in self.tensors and not whole:
                q, k = self.norm(q, at + "q_norm.weight"), self.norm(k, at + "k_norm.weight")
            if not turned_first:
                q, k = (self.rotate(x, position, layer) for x in (q, k))
            keys.append(k)
            values.append(v)
            for head in range(heads):
                g = head // (heads // kv_heads)
                first = max(0, position + 1 - self.window(layer))
                seen = list(zip(keys, values, strict=True))[first:]
                scores = [q[head] @ key[g] * of_scores for key, _ in seen]
                if at + "sinks" in self.tensors:
                    scores.append(self.tensors[at + "sinks"][head])
                p = softmax(np.array(scores))
                out[i, head] = sum(w * value[g] for w, (_, value) in zip(p, seen, strict=False))
        out = out / (1 + np.exp(-gates))
        return self.linear(at + "o_proj", out.reshape(len(rows), -1))

    def window(self, layer):
        types = self.config.get("layer_types")
        slides = types is not None and types[layer] == "sliding_attention"
        if self.config["model_type"] == "dots1" and types is None:
            slides = layer >= self.config["max_window_layers"]
        if (every := self.config.get("global_attn_every_n_layers")) and types is None:
            slides = (layer + 1) % every > 0
        return self.config["sliding_window"] if slides else 10**9

    def rotate(self, x, position, layer):
        if self.config.get("position_embedding_type") == "nope":
            return x
        if self.config["model_type"] in ("exaone_moe", "afmoe") and self.window(layer) == 10**9:
            return x
        turned = int(x.shape[1] * self.config.get("partial_rotary_factor", 1.0))
        turned = self.config.get("rotary_dim", turned)
        half, neighbours = turned // 2, self.config["model_type"] == "ernie4_5_moe"
        ropes = self.config.get("rope_parameters", self.config)
        if "full_attention" in ropes:
            ropes = ropes[self.config["layer_types"][layer]]
        theta = ropes["rope_theta"]
        alpha = (self.config.get("rope_scaling") or {}).get("alpha", 1.0)
        theta *= alpha ** (turned / (turned - 2))
        out = x.copy()
        for i in range(half):
            angle = position * theta ** (-2 * i / turned)
            one, other = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
            a, b, cos, sin = x[:, one], x[:, other], np.cos(angle), np.sin(angle)
            out[:, one], out[:, other] = a * cos - b * sin, b * cos + a * sin
        return out

    def moe(self, layer, moe_layer, h, rows, strategy, threshold, way):
        at = f"model.layers.{layer}.mlp."
        logits = self.linear(at + ("router" if self.is_gpt_oss else "gate"), h)
        m = logits.shape[1]
        ids, weights, gaps = zip(*(self.chosen(at, row) for row in logits), strict=True)
        self.gap = min(self.gap, *gaps)
        key = f"way{way}.layers.{moe_layer}."
        groups = self.united[key + "groups"].tolist() if way else [-1] * m
        exempt = [refuses for _, _, refuses in rows]
        planned, degraded, _ = plan_oracle.plan(
            ids, groups, threshold, strategy, [True] * len(rows), exempt
        )
        out = np.zeros_like(h)
        for i, visits in enumerate(planned):
            for weight, e in zip(weights[i], visits, strict=True):
                if e >= m:
                    out[i] += weight * self.united_expert(key, e - m, h[i])
                elif e >= 0 and self.is_gpt_oss:
                    out[i] += weight * self.joined_expert(f"{at}experts.", e, h[i])
                elif e >= 0:
                    out[i] += weight * self.mlp(f"{at}experts.{e}.", h[i])
        if at + "shared_expert_gate.weight" in self.tensors:
            opening = 1 / (1 + np.exp(-self.linear(at + "shared_expert_gate", h)))
            out += opening * self.mlp(at + "shared_expert.", h)
        if at + "shared_experts.down_proj.weight" in self.tensors:
            out += self.mlp(at + "shared_experts.", h)
        return out, np.array(degraded).sum(-1)

    def united_expert(self, key, e, h):
        own = {k: self.united[key + k][e] for k in ("gate_up", "down")}
        if self.config["model_type"] == "nemotron_h":
            return np.maximum(h @ own["gate_up"], 0) ** 2 @ own["down"]
        if not self.is_gpt_oss:
            gate, up = np.split(h @ own["gate_up"], 2)
            return (silu(gate) * up) @ own["down"]
        gate, up = np.split(h @ own["gate_up"] + self.united[key + "gate_up_bias"][e], 2)
        return self.clamped(gate, up) @ own["down"] + self.united[key + "down_bias"][e]

    def joined_expert(self, at, e, h):
        gate_up, up_bias, down, down_bias = (
            self.tensors[at + name][e]
            for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        )
        hidden = h @ gate_up + up_bias
        return self.clamped(hidden[::2], hidden[1::2]) @ down + down_bias

    def clamped(self, gate, up):
        limit, alpha = self.config["swiglu_limit"], self.config["swiglu_alpha"]
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (up + 1) * gate / (1 + np.exp(-alpha * gate))

    @property
    def is_qwen3_next(self):
        return self.config["model_type"] == "qwen3_next"

    @property
    def is_gpt_oss(self):
        return self.config["model_type"] == "gpt_oss"

    def chosen(self, at, logits):
        """Returns a row's experts, their weights, and how close the call was."""
        cfg = self.config
        keys, softmaxed = ("moe_k", "moe_topk", "num_experts_per_tok"), "ernie4_5_moe"
        top_k = next(cfg[key] for key in keys if key in cfg)
        always = (
            "granitemoe",
            "granitemoehybrid",
            "gpt_oss",
            "minimax_m2",
            "hy_v3",
            "afmoe",
            "hunyuan_v1_moe",
            softmaxed,
        )
        normalize = cfg.get("norm_topk_prob") or cfg["model_type"] in always
        if cfg["model_type"] == "phimoe":
            return sparsemixer(logits, cfg["router_jitter_noise"])
        biased = (
            "glm4_moe",
            "dots1",
            "minimax_m2",
            "hy_v3",
            "lfm2_moe",
            "nemotron_h",
            "exaone_moe",
            "afmoe",
            softmaxed,
        )
        if cfg["model_type"] in biased:
            biases = (f"{at}{own}e_score_correction_bias" for own in ("gate.", "moe_statics.", ""))
            scales = "routed_scaling_factor", "router_scaling_factor", "route_scale"
            [bias] = (self.tensors[name] for name in biases if name in self.tensors)
            return scored(
                logits,
                bias.ravel(),
                top_k,
                scoring="softmax" if cfg["model_type"] == softmaxed else "sigmoid",
                groups=cfg.get("n_group", 1),
                top_groups=cfg.get("topk_group", 1),
                best=2,
                scale=next((cfg[key] for key in scales if key in cfg), 1.0),
                normalize=normalize,
            )
        order = sorted(range(len(logits)), key=lambda e: (-logits[e], e))
        chosen = softmax(logits)[order[:top_k]]
        gap = logits[order[top_k - 1]] - logits[order[top_k]]
        return order[:top_k], chosen / chosen.sum() if normalize else chosen, gap
