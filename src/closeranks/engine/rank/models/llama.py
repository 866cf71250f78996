"""The Llama family (Llama, SmolLM, Mistral, Qwen2): a decoder over paged KV, one shard of a tensor-parallel group.

Query heads follow their KV group; the MLP and the output layer are cut along their width; the embedding and the norms
are whole on every rank. Two sums per layer, one gather of logits per pass, nothing else crosses ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..collectives import Group
from ..kernels import Kernels, Linear
from ..planes import PageLayout
from .batch import Batch
from .config import ModelConfig
from .names import EMBED, HEAD, ROPE
from .shard import Shard

Tensor = torch.Tensor
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Layer:
    """One decoder layer's shard; q, k, v and gate, up are one matrix each."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Built from a reader of canonical tensors (see `names.expected`), on the reader's device and dtype."""

    def __init__(self, config: ModelConfig, shard: Shard, read: Read, kernels: Kernels) -> None:
        self.config, self.shard, self.kernels = config, shard, kernels
        self.embedding = read(EMBED)
        """[vocab, hidden], whole: on the CPU a mapping of the file, so all ranks share its memory."""
        self.inv_freq = read(ROPE)
        self.layers = [self._layer(f"model.layers.{i}.", read) for i in range(config.layers)]
        self.norm = read("model.norm.weight")
        self.head = kernels.linear(read(EMBED if config.tied else HEAD)[cut(shard.vocab)], None)

    @property
    def pages(self) -> PageLayout:
        """What the model keeps in the pool."""
        c = self.config
        return PageLayout(
            planes=("k", "v"),
            layers=c.layers,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            dtype=self.embedding.dtype,
        )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def _layer(self, at: str, read: Read) -> Layer:
        config, shard, linear = self.config, self.shard, self.kernels.linear
        dim = config.head_dim
        q = slice(shard.heads.start * dim, shard.heads.stop * dim)
        kv = slice(shard.kv.start * dim, shard.kv.stop * dim)
        mlp = cut(shard.mlp)

        def fused(names: tuple[str, ...], cuts: tuple[slice, ...], bias: bool) -> Linear:
            def joined(kind: str) -> Tensor:
                return torch.cat([read(f"{at}{n}.{kind}")[c] for n, c in zip(names, cuts, strict=True)])

            return linear(joined("weight"), joined("bias") if bias else None)

        def summed(name: str, columns: slice, bias: bool) -> Linear:
            # The sum over ranks must hold the bias once.
            own = read(f"{at}{name}.bias") if bias and shard.rank == 0 else None
            return linear(read(f"{at}{name}.weight")[:, columns].contiguous(), own)

        return Layer(
            attention_norm=read(at + "input_layernorm.weight"),
            qkv=fused(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv), config.qkv_bias),
            out=summed("self_attn.o_proj", q, config.output_bias),
            mlp_norm=read(at + "post_attention_layernorm.weight"),
            gate_up=fused(("mlp.gate_proj", "mlp.up_proj"), (mlp, mlp), config.mlp_bias),
            down=summed("mlp.down_proj", mlp, config.mlp_bias),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, group: Group) -> Tensor | None:
        """Compute the batch's tokens, leaving their KV in `pool`.

        Returns the logits of the sampled rows [S, vocab here] in float32, or None if no row samples.
        """
        k, eps, heads = self.kernels, self.config.norm_eps, len(self.shard.heads)
        k.rotation(batch, self.inv_freq)
        x = F.embedding(batch.tokens, self.embedding)
        y = k.rms_norm(x, self.layers[0].attention_norm, eps)
        for i, layer in enumerate(self.layers):
            y = layer.out(k.attend(layer.qkv(y), heads, pool, i, batch))
            group.all_reduce(y)
            y = k.add_rms_norm(x, y, layer.mlp_norm, eps)
            y = layer.down(k.silu_mul(layer.gate_up(y)))
            group.all_reduce(y)
            following = self.layers[i + 1].attention_norm if i + 1 < len(self.layers) else self.norm
            if i + 1 == len(self.layers):  # only sampled rows are wanted from here on
                if not len(batch.sampled):
                    return None
                x, y = x[batch.sampled], y[batch.sampled]
            y = k.add_rms_norm(x, y, following, eps)
        return self.head(y).float()


def cut(part: range) -> slice:
    """A contiguous range as a slice."""
    return slice(part.start, part.stop)
