"""What people write out by hand: norms, activations, attention, and a GPT of them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class LlamaNorm(nn.Module):
    """Helper methods, a cast, and eps under another name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.variance_epsilon = 1e-5
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden):
        return self.gain * self._norm(hidden.float()).type_as(hidden)


class GemmaNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / 10)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(width) + 0.5)
        self.beta = nn.Parameter(torch.randn(width))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.gamma * (x - mean) / torch.sqrt(variance + 1e-5) + self.beta


class UnbiasedNorm(LayerNorm):
    """As in "The Annotated Transformer": no LayerNorm of PyTorch's is equal to it."""

    def forward(self, x):
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.gamma * (x - mean) / (deviation + 1e-6) + self.beta


class NewGELU(nn.Module):
    def forward(self, x):
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class GELU(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class Attention(nn.Module):
    """As in nanoGPT."""

    def __init__(self, width: int, heads: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(0.1)
        mask = torch.tril(torch.ones(length, length)).view(1, 1, length, length)
        self.register_buffer("mask", mask, persistent=False)

    def split(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        return q, k, v

    def join(self, y):
        B, H, T, D = y.shape
        return self.resid_dropout(self.proj(y.transpose(1, 2).contiguous().view(B, T, H * D)))

    def forward(self, x):
        q, k, v = self.split(x)
        T = x.size(1)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        return self.join(att @ v)


class LlamaAttention(Attention):
    """A mask that is added, and a softmax in float32."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads, length)
        del self.mask

    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(x.shape[-1] // self.heads)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.join(torch.matmul(scores, v))


class ApartAttention(nn.Module):
    """Three layers, no output layer, and a mask that is one where nothing is to be seen."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("hidden", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, x):
        B, T, C = x.shape
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (one(x).view(B, T, self.num_heads, -1).transpose(1, 2) for one in layers)
        scores = q @ k.transpose(2, 3) / k.shape[-1] ** 0.5
        scores.masked_fill_(self.hidden.bool()[:T, :T], -torch.inf)
        return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(B, T, C)


class HeadsAttention(Attention):
    """As in GPT-NeoX: q, k and v of a head lie together. Less is seen of what is far."""

    def forward(self, x):
        B, T, C = x.shape
        each = self.qkv(x).view(B, T, self.heads, 3 * C // self.heads).transpose(1, 2)
        q, k, v = each.chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1)) + self.far
        return self.join(F.softmax(scores, dim=-1) @ v)

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads, length)
        del self.mask
        places = torch.arange(length)
        self.register_buffer("far", -(places - places.unsqueeze(1)).abs().float() / 4)


class WindowAttention(Attention):
    """Its mask is made in its forward: on a short batch nobody sees how far it lets look."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads, length)
        del self.mask

    def forward(self, x):
        q, k, v = self.split(x)
        near = torch.ones(x.shape[1], x.shape[1]).tril(999).triu(-999)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))).masked_fill(near == 0, -1e9)
        return self.join(F.softmax(scores, dim=-1) @ v)


class KeptAttention(Attention):
    """What the softmax makes is returned, too."""

    def forward(self, x):
        q, k, v = self.split(x)
        att = F.softmax(q @ k.transpose(-2, -1), dim=-1)
        return self.join(att @ v), att


class CountingAttention(Attention):
    """Leaves something behind at each call."""

    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        q, k, v = self.split(x)
        return self.join(F.softmax(q @ k.transpose(-2, -1), dim=-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, length)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), NewGELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, *, width=64, heads=4, length=64, layers=2, words=65) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, length) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
