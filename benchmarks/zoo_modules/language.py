"""Language models: transformers, litgpt, x-transformers, Lightning's demos."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor
from typing_extensions import override

from zoo_modules.base import HuggingFace, Work, line, tokens


def _decoder(tiny: bool, model: str, config: str, *, width: int = 1024, layers: int = 8, **more: Any) -> Work:
    """Build a causal language model of transformers by the names of its classes."""
    import transformers

    heads, vocabulary, batch, length = (4, 128, 2, 32) if tiny else (width // 64, 32000, 8, 1024)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 64 if tiny else width,
        "intermediate_size": 128 if tiny else 4 * width,
        "num_hidden_layers": 2 if tiny else layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    made = getattr(transformers, config)(**{**sizes, **more})
    return Work(HuggingFace(getattr(transformers, model)(made)), tokens(batch, length, vocabulary))


@line("llama", "decoder", "transformers", gate=True)
def llama(tiny: bool) -> Work:
    """Llama."""
    return _decoder(tiny, "LlamaForCausalLM", "LlamaConfig", width=1536, layers=4, num_key_value_heads=2 if tiny else 8)


@line("gpt2", "decoder", "transformers", gate=True)
def gpt2(tiny: bool) -> Work:
    """GPT-2, tied, without dropout."""
    import transformers

    width, layers, heads, vocabulary, batch, length = (64, 2, 4, 128, 2, 32) if tiny else (1024, 4, 16, 50257, 16, 1024)
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Work(HuggingFace(transformers.GPT2LMHeadModel(config)), tokens(batch, length, vocabulary))


@line("qwen3", "decoder", "transformers")
def qwen3(tiny: bool) -> Work:
    """Qwen3 with tied embeddings and norms of queries and keys."""
    more = {"head_dim": 16, "num_key_value_heads": 2} if tiny else {"head_dim": 128, "num_key_value_heads": 8}
    return _decoder(tiny, "Qwen3ForCausalLM", "Qwen3Config", tie_word_embeddings=True, **more)


@line("gemma2", "decoder", "transformers")
def gemma2(tiny: bool) -> Work:
    """Gemma 2: capped logits, sliding windows, scaled embeddings."""
    more = {"head_dim": 16, "num_key_value_heads": 2} if tiny else {"head_dim": 128, "num_key_value_heads": 4}
    return _decoder(tiny, "Gemma2ForCausalLM", "Gemma2Config", layers=6, sliding_window=16 if tiny else 512, **more)


@line("gpt_neox", "decoder", "transformers")
def gpt_neox(tiny: bool) -> Work:
    """Pythia's architecture: attention and MLP in parallel."""
    return _decoder(tiny, "GPTNeoXForCausalLM", "GPTNeoXConfig", layers=6)


@line("opt", "decoder", "transformers", draws=True)
def opt(tiny: bool) -> Work:
    """OPT with its default dropout."""
    wide = {"ffn_dim": 128, "word_embed_proj_dim": 64} if tiny else {"ffn_dim": 4096, "word_embed_proj_dim": 1024}
    return _decoder(tiny, "OPTForCausalLM", "OPTConfig", layers=6, **wide)


@line("mixtral", "mixture of experts", "transformers", gate=True)
def mixtral(tiny: bool) -> Work:
    """Mixtral with 8 experts."""
    more = {"num_key_value_heads": 2, "num_local_experts": 4} if tiny else {"num_key_value_heads": 4}
    wide = {} if tiny else {"intermediate_size": 1792}
    return _decoder(tiny, "MixtralForCausalLM", "MixtralConfig", width=768, layers=4, **more, **wide)


@line("qwen3_moe", "mixture of experts", "transformers")
def qwen3_moe(tiny: bool) -> Work:
    """Qwen3 with many small experts and the loss that balances them."""
    sizes = (
        {"head_dim": 16, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32}
        if tiny
        else {"head_dim": 64, "num_key_value_heads": 4, "num_experts": 32, "moe_intermediate_size": 384}
    )
    more = {"num_experts_per_tok": 2 if tiny else 4, "output_router_logits": True, **sizes}
    return _decoder(tiny, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", width=768, layers=4, **more)


@line("mamba2", "state space", "transformers")
def mamba2(tiny: bool) -> Work:
    """Mamba 2, by the code of transformers that needs no kernels."""
    import transformers

    width, layers, heads, vocabulary, batch, length = (32, 2, 4, 128, 2, 32) if tiny else (512, 4, 16, 32000, 4, 512)
    config = transformers.Mamba2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_heads=heads,
        head_dim=2 * width // heads,
        state_size=16 if tiny else 64,
        n_groups=1,
        chunk_size=16 if tiny else 128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Work(HuggingFace(transformers.Mamba2ForCausalLM(config)), tokens(batch, length, vocabulary))


def _encoder(tiny: bool, model: str, config: str, *, batch: int = 32, length: int = 512, **more: Any) -> Work:
    """Build an encoder of transformers with BERT's names."""
    import transformers

    width, layers, heads, wide, vocabulary = (64, 2, 4, 128, 128) if tiny else (768, 4, 12, 3072, 30522)
    batch, length = (2, 32) if tiny else (batch, length)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": wide,
        "max_position_embeddings": length + 4,
        "pad_token_id": 0,
        **more,
    }
    made = getattr(transformers, config)(**sizes)
    return Work(HuggingFace(getattr(transformers, model)(made)), tokens(batch, length, vocabulary, mask=True))


@line("bert", "encoder", "transformers", gate=True)
def bert(tiny: bool) -> Work:
    """BERT's masked language model, without dropout."""
    return _encoder(tiny, "BertForMaskedLM", "BertConfig", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@line("roberta_dropout", "encoder", "transformers", draws=True)
def roberta(tiny: bool) -> Work:
    """RoBERTa with its default dropout."""
    return _encoder(tiny, "RobertaForMaskedLM", "RobertaConfig")


@line("albert", "encoder", "transformers")
def albert(tiny: bool) -> Work:
    """ALBERT, whose layers share their weights."""
    return _encoder(tiny, "AlbertForMaskedLM", "AlbertConfig", embedding_size=32 if tiny else 128)


@line("modernbert", "encoder", "transformers")
def modernbert(tiny: bool) -> Work:
    """ModernBERT: rotary positions, local and global attention."""
    more = {"local_attention": 16 if tiny else 128, "cls_token_id": 1, "sep_token_id": 2}
    wide = {} if tiny else {"intermediate_size": 1152}
    return _encoder(tiny, "ModernBertForMaskedLM", "ModernBertConfig", **more, **wide)


@line("deberta", "encoder", "transformers")
def deberta(tiny: bool) -> Work:
    """DeBERTa v2 with disentangled attention."""
    attention = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16 if tiny else 256}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _encoder(tiny, "DebertaV2ForMaskedLM", "DebertaV2Config", batch=16, **attention, **drop)


@line("t5", "encoder-decoder", "transformers", gate=True)
def t5(tiny: bool) -> Work:
    """T5, without dropout."""
    import transformers

    width, layers, heads, wide, vocabulary, batch, length = (
        (64, 2, 4, 128, 128, 2, 32) if tiny else (1024, 3, 16, 2816, 32128, 16, 512)
    )
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=wide,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return Work(HuggingFace(transformers.T5ForConditionalGeneration(config)), tokens(batch, length, vocabulary))


@line("bart", "encoder-decoder", "transformers", draws=True)
def bart(tiny: bool) -> Work:
    """BART with its default dropout."""
    import transformers

    width, layers, heads, wide, vocabulary, batch, length = (
        (64, 2, 4, 128, 128, 2, 32) if tiny else (768, 4, 12, 3072, 50265, 8, 512)
    )
    config = transformers.BartConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=wide,
        decoder_ffn_dim=wide,
        max_position_embeddings=length,
        decoder_start_token_id=2,
    )
    return Work(HuggingFace(transformers.BartForConditionalGeneration(config)), tokens(batch, length, vocabulary))


def _shifted(batch: int, length: int, vocabulary: int) -> Any:
    def make(generator: Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (batch, length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return make


class LitGPT(LightningModule):
    """As litgpt's tutorial for LightningModules has it, with a schedule of the learning rate."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @override
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        from litgpt.utils import chunked_cross_entropy

        inputs, targets = batch
        loss = chunked_cross_entropy(self.model(inputs)[..., :-1, :], targets[..., :-1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4, weight_decay=0.0, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@line("litgpt", "decoder", "litgpt", way="lr schedule")
def litgpt(tiny: bool) -> Work:
    """Pythia's configuration in litgpt."""
    from litgpt import GPT, Config

    layers, heads, width, vocabulary, batch, length = (2, 4, 64, 128, 2, 32) if tiny else (6, 16, 1024, 32000, 8, 1024)
    config = Config.from_name(
        "pythia-160m",
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        padded_vocab_size=vocabulary,
        block_size=length,
        intermediate_size=4 * width,
    )
    return Work(LitGPT(GPT(config)), _shifted(batch, length, vocabulary))


class Autoregressive(LightningModule):
    """As the README of x-transformers has it: the wrapper computes the loss."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["input_ids"])

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


@line("x_transformers", "decoder", "x_transformers", way="gradient clipping")
def x_transformers(tiny: bool) -> Work:
    """A decoder of x-transformers with rotary positions and gated linear units."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    width, depth, heads, vocabulary, batch, length = (64, 2, 4, 128, 2, 32) if tiny else (1024, 6, 16, 20000, 8, 1024)
    layers = Decoder(dim=width, depth=depth, heads=heads, rotary_pos_emb=True, ff_glu=True, attn_flash=True)
    net = TransformerWrapper(num_tokens=vocabulary, max_seq_len=length, attn_layers=layers)
    data = tokens(batch, length, vocabulary, labels=False)
    return Work(Autoregressive(AutoregressiveWrapper(net)), data, trainer={"gradient_clip_val": 0.5})


@line("lightning_transformer", "Lightning's demos", "lightning", gate=True, draws=True)
def lightning_transformer(tiny: bool) -> Work:
    """Lightning's demo of a language model, as it is."""
    from lightning.pytorch.demos.transformer import LightningTransformer

    class Local(LightningTransformer):
        prepare_data = LightningModule.prepare_data  # it would download a text

    vocabulary, batch, length = (128, 2, 16) if tiny else (33278, 64, 128)
    return Work(Local(vocab_size=vocabulary), _shifted(batch, length, vocabulary))


@line("lightning_lstm", "Lightning's demos", "lightning", way="gradient clipping", draws=True)
def lightning_lstm(tiny: bool) -> Work:
    """Lightning's demo of a recurrent language model, which carries its state from batch to batch."""
    from lightning.pytorch.demos.lstm import LightningLSTM

    class Local(LightningLSTM):
        prepare_data = LightningModule.prepare_data  # it would download a text
        train_dataloader = LightningModule.train_dataloader

    vocabulary, batch, length = (128, 2, 8) if tiny else (33278, 64, 128)
    data = _shifted(batch, length, vocabulary)
    return Work(Local(vocab_size=vocabulary), data, trainer={"gradient_clip_val": 0.25})


@line("lightning_boring", "Lightning's demos", "lightning")
def lightning_boring(_tiny: bool) -> Work:
    """Lightning's BoringModel: one linear layer, all of it the host's time."""
    from lightning.pytorch.demos import BoringModel

    return Work(BoringModel(), lambda generator: torch.randn(4, 32, generator=generator))


@line("lightning_boring_manual", "Lightning's demos", "lightning", way="manual optimization")
def lightning_boring_manual(_tiny: bool) -> Work:
    """The same with manual optimization."""
    from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel

    return Work(ManualOptimBoringModel(), lambda generator: torch.randn(4, 32, generator=generator))


class Rewarded(LightningModule):
    """Direct preference optimization of a policy against a frozen copy of it."""

    def __init__(self, policy: Any, reference: Any) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference.eval().requires_grad_(False)

    @staticmethod
    def _log_likelihood(model: Any, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        chosen, rejected = batch
        with torch.no_grad():
            before = self._log_likelihood(self.reference, chosen) - self._log_likelihood(self.reference, rejected)
        now = self._log_likelihood(self.policy, chosen) - self._log_likelihood(self.policy, rejected)
        return -F.logsigmoid(0.1 * (now - before)).mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.policy.parameters(), lr=1e-5)


@line("dpo", "ways to train", "transformers", way="frozen reference model")
def dpo(tiny: bool) -> Work:
    """Preferences with a Llama and its frozen copy."""
    import copy

    import transformers

    width, layers, heads, vocabulary, batch, length = (64, 2, 4, 128, 2, 16) if tiny else (768, 6, 12, 32000, 8, 512)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    policy = transformers.LlamaForCausalLM(config)

    def pairs(generator: Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (2, batch, length), generator=generator)
        return ids[0], ids[1]

    return Work(Rewarded(policy, copy.deepcopy(policy)), pairs)
