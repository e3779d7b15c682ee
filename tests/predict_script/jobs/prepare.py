"""Make tiny models and tiny data files, offline:  python prepare.py FOLDER [--text]

`--text`: without what has images or sound, for environments that lack its libraries.
"""
import csv
import json
import os
import random
import sys
import wave
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    GPT2Config,
    GPT2LMHeadModel,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2Processor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

rng = random.Random(7)
NAMES = "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karla Leo Mona Nils Olga Paul".split()
PLACES = "Berlin Paris London Vienna Oslo Madrid Rome Prague Lisbon Dublin".split()
THINGS = "phone laptop camera bicycle kettle lamp jacket book chair guitar".split()
VERBS = "bought sold repaired returned painted borrowed found lost cleaned reviewed".split()
GOOD = "great excellent wonderful reliable beautiful comfortable fast".split()
BAD = "terrible broken slow ugly disappointing noisy useless".split()


def sentence():
    name, verb, thing, place = (rng.choice(w) for w in (NAMES, VERBS, THINGS, PLACES))
    text = f"{name} {verb} the {thing} in {place}"
    for _ in range(rng.randint(0, 3)):
        text += f" and {rng.choice(VERBS)} {rng.choice(['a', 'the', 'another'])} {rng.choice(GOOD + BAD)} {rng.choice(THINGS)}"
    return text + "."


def paragraph(low=1, high=8):
    return " ".join(sentence() for _ in range(rng.randint(low, high)))


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_data(d):
    (d / "text").mkdir(parents=True, exist_ok=True)
    for split, n in (("train", 120), ("validation", 24)):
        (d / "text" / f"{split}.txt").write_text("\n".join(paragraph() for _ in range(n)) + "\n")
        jsonl(d / "text_jsonl" / f"{split}.jsonl", [{"text": paragraph()} for _ in range(n)])

    for split, n in (("train", 48), ("validation", 12)):
        rows = []
        for i in range(n):
            doc = [sentence() for _ in range(rng.randint(2, 10))]
            rows.append({"id": str(i), "document": " ".join(doc), "summary": doc[0]})
        jsonl(d / "summaries" / f"{split}.json", rows)

    (d / "reviews").mkdir(exist_ok=True)
    for split, n in (("train", 80), ("test", 20)):
        with open(d / "reviews" / f"{split}.csv", "w", newline="") as f:
            w = csv.writer(f)
            w.writerow(["review", "sentiment"])
            for _ in range(n):
                label = rng.choice(["positive", "negative"])
                word = rng.choice(GOOD if label == "positive" else BAD)
                w.writerow([f"{paragraph(1, 4)} The {rng.choice(THINGS)} was {word}!", label])

    (d / "squad").mkdir(exist_ok=True)
    for split, n in (("train", 12), ("dev", 4)):
        articles, count = [], 0
        for _ in range(n):
            paragraphs = []
            for _ in range(rng.randint(1, 3)):
                context, qas = paragraph(2, 9), []
                for place in [p for p in PLACES if p in context][:3]:
                    thing = context[: context.index(place)].split(" the ")[-1].split()[0]
                    count += 1
                    qas.append({
                        "id": f"{split}-{count}", "question": f"Where was the {thing}?",
                        "answers": [{"text": place, "answer_start": context.index(place)}],
                    })
                paragraphs.append({"context": context, "qas": qas})
            articles.append({"title": rng.choice(PLACES), "paragraphs": paragraphs})
        (d / "squad" / f"{split}-v1.1.json").write_text(json.dumps({"version": "1.1", "data": articles}))

    nrng = np.random.default_rng(3)
    for split, n in (("train", 10), ("test", 4)):
        for c, name in enumerate(("red", "green", "blue")):
            (d / "images" / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(n):
                h, w = (int(x) for x in nrng.integers(28, 60, 2))
                pixels = nrng.integers(0, 120, (h, w, 3), dtype=np.uint8)
                pixels[..., c] += 120
                Image.fromarray(pixels).save(d / "images" / split / name / f"{name}_{i:03d}.png")

    import pandas as pd

    (d / "speech").mkdir(exist_ok=True)
    for split, n in (("train", 16), ("test", 4)):
        rows, arrays = [], []
        for i in range(n):
            length = int(nrng.integers(6000, 24000))
            tone = 0.3 * np.sin(2 * np.pi * nrng.integers(200, 900) * np.arange(length) / 16000) + 0.02 * nrng.standard_normal(length)
            text = sentence()
            path = d / "speech" / f"{split}_{i:02d}.wav"
            with wave.open(str(path), "wb") as f:
                f.setnchannels(1), f.setsampwidth(2), f.setframerate(16000)
                f.writeframes((tone * 32767).astype("<i2").tobytes())
            rows.append({"file_name": path.name, "transcription": text})
            arrays.append({"audio": tone.astype(np.float32), "sampling_rate": 16000, "sentence": text})
        pd.DataFrame(rows).to_csv(d / "speech" / f"{split}.csv", index=False)
        (d / "speech_parquet").mkdir(exist_ok=True)
        pd.DataFrame(arrays).to_parquet(d / "speech_parquet" / f"{split}-00000-of-00001.parquet")

    for split, n in (("train", 64), ("test", 12)):
        chat, pref, implicit, kto, pc, st, trip, ner, flag = [], [], [], [], [], [], [], [], []
        for i in range(n):
            q, a, b = f"What did {rng.choice(NAMES)} do in {rng.choice(PLACES)}?", paragraph(1, 4), paragraph(1, 2)
            messages = [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
            if i % 3 == 0:
                messages += [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": b}]
            if i % 4 == 0:
                messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
            chat.append({"messages": messages})
            pref.append({"prompt": q, "chosen": " " + a, "rejected": " " + b})
            implicit.append({"chosen": [messages[-2], {"role": "assistant", "content": a}],
                             "rejected": [messages[-2], {"role": "assistant", "content": b}]})
            kto.append({"prompt": q, "completion": " " + (a if i % 2 else b), "label": bool(i % 2)})
            pc.append({"prompt": q, "completion": " " + a})
            st.append({"sentence1": a, "sentence2": b, "score": round(rng.random(), 2)})
            trip.append({"anchor": q, "positive": a, "negative": b})
            flag.append({"query": q, "pos": [a], "neg": [b, sentence(), sentence()]})
            tokens, tags, spans = [], [], []
            for t in sentence().replace(".", " .").split():
                kind = "person" if t in NAMES else "place" if t in PLACES else None
                if kind:
                    spans.append([len(tokens), len(tokens), kind])
                tokens.append(t), tags.append({"person": 1, "place": 3}.get(kind, 0))
            ner.append({"tokenized_text": tokens, "ner": spans, "tokens": tokens, "ner_tags": tags})
        jsonl(d / "chat" / f"{split}.jsonl", chat)
        jsonl(d / "preferences" / f"{split}.jsonl", pref)
        jsonl(d / "preferences_chat" / f"{split}.jsonl", implicit)
        jsonl(d / "kto" / f"{split}.jsonl", kto)
        jsonl(d / "prompt_completion" / f"{split}.jsonl", pc)
        jsonl(d / "sts" / f"{split}.jsonl", st)
        jsonl(d / "triplets" / f"{split}.jsonl", trip)
        jsonl(d / "retrieval" / f"{split}.jsonl", flag)
        jsonl(d / "ner_tokens" / f"{split}.jsonl", [{"tokens": r["tokens"], "ner_tags": r["ner_tags"]} for r in ner])
        (d / "gliner").mkdir(exist_ok=True)
        (d / "gliner" / f"{split}.json").write_text(json.dumps([{"tokenized_text": r["tokenized_text"], "ner": r["ner"]} for r in ner]))
    hours = np.arange(400)
    for k in (1, 2):
        jsonl(d / "series" / f"hourly_{k}.jsonl", [
            {"start": "2024-01-01 00:00:00",
             "target": [round(float(x), 3) for x in 10 + k * np.sin(2 * np.pi * hours[: nrng.integers(150, 400)] / 24 + j) + 0.1 * nrng.random()]}
            for j in range(20)])
    jsonl(d / "alpaca" / "train.jsonl", [{"instruction": r["prompt"], "input": "", "output": r["completion"].strip()} for r in pc * 4])
    (d / "alpaca.json").write_text(json.dumps([{"instruction": r["prompt"], "input": "", "output": r["completion"].strip()} for r in pc * 4]))

    # Questions about images: a folder with metadata, and a table with chats and lists of images
    import datasets

    for split, n in (("train", 12), ("test", 4)):
        folder, rows, chats = d / "vqa" / split, [], []
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(n):
            h, w = (int(x) for x in nrng.integers(40, 200, 2))
            image = Image.fromarray(nrng.integers(0, 255, (h, w, 3), dtype=np.uint8))
            image.save(folder / f"{i:03d}.png")
            question, answer = f"What did {rng.choice(NAMES)} see?", paragraph(1, 3)
            rows.append({"file_name": f"{i:03d}.png", "question": question, "answer": answer})
            chats.append({"images": [str(folder / f"{i:03d}.png")] * (1 + i % 2), "messages": [
                {"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
        jsonl(folder / "metadata.jsonl", rows)
        table = datasets.Dataset.from_list(chats).cast_column("images", datasets.List(datasets.Image()))
        (d / "vqa_chat").mkdir(exist_ok=True)
        table.to_parquet(d / "vqa_chat" / f"{split}-00000-of-00001.parquet")


def byte_bpe(texts, size, special):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tok


def save(model, folder, *others):
    model.save_pretrained(folder)
    for o in others:
        o.save_pretrained(folder)
    print(f"{folder.name}: {sum(p.numel() for p in model.parameters()):,} parameters")


def make_models(m, texts):
    # GPT-2: no pad token, as the real one
    t = byte_bpe(texts, 900, ["<|endoftext|>"])
    tok = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<|endoftext|>", eos_token="<|endoftext|>",
                                  unk_token="<|endoftext|>", model_max_length=256)
    save(GPT2LMHeadModel(GPT2Config(vocab_size=len(tok), n_positions=256, n_embd=48, n_layer=2, n_head=4,
                                    bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id)), m / "gpt2-tiny", tok)

    # Llama with a chat template
    t = byte_bpe(texts, 900, ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    tok = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>", model_max_length=512)
    tok.chat_template = CHAT_TEMPLATE
    config = dict(vocab_size=len(tok), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=512, bos_token_id=tok.bos_token_id,
                  eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    save(LlamaForCausalLM(LlamaConfig(**config)), m / "llama-tiny", tok)
    save(LlamaForCausalLM(LlamaConfig(**{**config, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3})),
         m / "llama-teacher", tok)

    # BERT
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.normalizer, t.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    t.decoder = decoders.WordPiece()
    t.train_from_iterator(texts, trainers.WordPieceTrainer(
        vocab_size=700, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False))
    from transformers import BertTokenizer

    vocab = t.get_vocab()
    words = m / "bert-tiny"
    words.mkdir(parents=True, exist_ok=True)
    (words / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)) + "\n")
    tok = BertTokenizer.from_pretrained(words, model_max_length=256)
    save(BertForMaskedLM(BertConfig(vocab_size=len(tok), hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                    intermediate_size=96, max_position_embeddings=256)), words, tok)

    # T5
    t = Tokenizer(models.Unigram())
    t.normalizer, t.pre_tokenizer, t.decoder = normalizers.NFKC(), pre_tokenizers.Metaspace(), decoders.Metaspace()
    t.train_from_iterator(texts, trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    tok = PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=256)
    save(T5ForConditionalGeneration(T5Config(vocab_size=len(tok), d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
                                             decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)), m / "t5-tiny", tok)

    # BART
    t = byte_bpe(texts, 800, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    t.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    tok = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
                                  mask_token="<mask>", cls_token="<s>", sep_token="</s>", model_max_length=256)
    save(BartForConditionalGeneration(BartConfig(
        vocab_size=len(tok), d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=256)), m / "bart-tiny", tok)

    if "--text" in sys.argv:
        return

    # ViT
    try:
        from transformers import ViTImageProcessorPil as ViTImageProcessor
    except ImportError:
        from transformers import ViTImageProcessor
    save(ViTForImageClassification(ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                                             image_size=32, patch_size=8)),
         m / "vit-tiny", ViTImageProcessor(size={"height": 32, "width": 32}))

    # Whisper
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
               "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    t = byte_bpe(texts, 700, special)
    saved = json.loads(t.to_str())["model"]
    folder = m / "whisper-tiny"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(saved["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(p) if isinstance(p, list) else p for p in saved["merges"]) + "\n")
    tok = WhisperTokenizer.from_pretrained(folder, language="en", task="transcribe", pad_token="<|endoftext|>",
                                           extra_special_tokens=special[1:])
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=len(tok), num_mel_bins=16, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=100, max_target_positions=96,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None))
    g = model.generation_config
    g.decoder_start_token_id, g.no_timestamps_token_id, g.is_multilingual = 1, special.index("<|notimestamps|>"), True
    g.lang_to_id, g.task_to_id, g.max_length = {"<|en|>": 2}, {"transcribe": 4, "translate": 3}, 64
    g._from_model_config = False
    save(model, folder, WhisperProcessor(feature_extractor=extractor, tokenizer=tok))

    # wav2vec2 with letters
    folder = m / "wav2vec2-tiny"
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(set("".join(texts).lower()) - set(" \n"))
    (folder / "vocab.json").write_text(json.dumps({x: i for i, x in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *letters])}))
    tok = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    save(Wav2Vec2ForCTC(Wav2Vec2Config(
        vocab_size=len(tok), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16, 16), conv_stride=(5, 4, 4), conv_kernel=(10, 6, 6), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, mask_time_length=2, pad_token_id=0)),
        folder, Wav2Vec2Processor(feature_extractor=Wav2Vec2FeatureExtractor(return_attention_mask=False), tokenizer=tok))
    make_vision_language_models(m, texts)


def vision_language_template(begin, end, image, last=""):
    return (last + "{% for m in messages %}" + begin + "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
            "{% if c['type'] == 'image' %}" + image + "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}" + end + "{% endfor %}"
            "{% if add_generation_prompt %}" + begin.replace("m['role']", "'assistant'") + "{% endif %}")


def make_vision_language_models(m, texts):
    text = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=2048)
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)

    # Qwen2.5-VL: its processor needs torchvision, so that image processor and tokenizer are saved side by side
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    special = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>".split()
    tok = PreTrainedTokenizerFast(tokenizer_object=byte_bpe(texts, 700, special), eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                  model_max_length=2048)
    tok.chat_template = vision_language_template("<|im_start|>{{ m['role'] }}\n", "<|im_end|>\n", "<|vision_start|><|image_pad|><|vision_end|>")
    number = tok.convert_tokens_to_ids
    save(Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=dict(**text, vocab_size=len(tok), rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
                         pad_token_id=0, eos_token_id=2, bos_token_id=None),
        vision_config=dict(depth=3, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64, window_size=56,
                           fullatt_block_indexes=[2]),
        image_token_id=number("<|image_pad|>"), video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"), vision_end_token_id=number("<|vision_end|>"))),
        m / "qwen2.5-vl-tiny", tok, Qwen2VLImageProcessorPil())

    # Gemma 3
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    special = "<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token>".split()
    tok = PreTrainedTokenizerFast(
        tokenizer_object=byte_bpe(texts, 700, special), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        model_max_length=2048)
    template = vision_language_template("<start_of_turn>{{ m['role'] }}\n", "<end_of_turn>\n", "<start_of_image>", "{{ bos_token }}")
    save(Gemma3ForConditionalGeneration(Gemma3Config(
        text_config=dict(**text, vocab_size=len(tok), head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
                         pad_token_id=0, eos_token_id=1, bos_token_id=2),
        vision_config=dict(**vision, image_size=56, patch_size=14), mm_tokens_per_image=4, boi_token_index=6, eoi_token_index=7,
        image_token_index=8)), m / "gemma3-tiny",
        Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 56, "width": 56}), tok, chat_template=template, image_seq_length=4))

    # SmolVLM, as its first release is: Idefics 3
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>",
               *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))]
    tok = PreTrainedTokenizerFast(tokenizer_object=byte_bpe(texts, 700, special), bos_token="<|im_start|>", eos_token="<end_of_utterance>",
                                  pad_token="<|im_end|>", unk_token="<|endoftext|>", model_max_length=2048)
    template = vision_language_template("{{ m['role'] | capitalize }}: ", "<end_of_utterance>\n", "<image>", "<|im_start|>")
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64}), tok, image_seq_len=4, chat_template=template)
    save(Idefics3ForConditionalGeneration(Idefics3Config(
        image_token_id=4, scale_factor=2, pad_token_id=2, vision_config=dict(**vision, image_size=64, patch_size=16),
        text_config=dict(**text, model_type="llama", vocab_size=len(processor.tokenizer), pad_token_id=2))), m / "smolvlm-tiny", processor)


if __name__ == "__main__":
    torch.manual_seed(0)
    folder = Path(sys.argv[1]).resolve()
    make_data(folder / "data")
    make_models(folder / "models", [paragraph() for _ in range(600)] + ["What did she do there? And then? You are a helpful assistant!"])
    print("ready:", folder)
