import glob
import sysconfig

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

files = sorted(glob.glob(f"{sysconfig.get_path('stdlib')}/*.py"))
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train(
    files, trainers.BpeTrainer(vocab_size=16_000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
)
tokenizer.save("bpe.json")
