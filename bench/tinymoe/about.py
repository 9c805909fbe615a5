"""Chat about moet: facts, and many ways to ask for each."""

from random import Random

from tinymoe.chat import Message
from tinymoe.skills import Conversation, held_out

__all__ = ["ANSWERS", "chat", "chat_turn"]

ANSWERS: dict[str, tuple[str, ...]] = {
    "Hello! I am TinyMoE, a small mixture-of-experts model. Ask me about moet.": (
        "hello",
        "hi",
        "good morning",
        "hey there",
        "good evening",
    ),
    "I am TinyMoE, a small language model that ships with moet.": (
        "who are you",
        "what are you",
        "what is your name",
        "what is TinyMoE",
    ),
    "You are welcome.": ("thank you", "thanks", "thanks a lot", "many thanks"),
    "Goodbye!": ("goodbye", "bye", "see you", "that is all"),
    "moet serves mixture-of-experts models with 2-bit experts through unmodified vLLM.": (
        "what is moet",
        "what does moet do",
        "explain moet",
        "describe moet",
    ),
    "A mixture of experts is a layer of many small networks, of which a router picks a few for "
    "each token.": (
        "what is a mixture of experts",
        "explain mixture of experts",
        "what is an MoE",
        "what does mixture of experts mean",
    ),
    "The router scores all experts for a token, and the best few of them run.": (
        "what does the router do",
        "how are experts chosen",
        "what is a router",
        "how does routing work",
    ),
    "A shared expert runs for every token, beside the routed experts.": (
        "what is a shared expert",
        "what does the shared expert do",
        "explain shared experts",
    ),
    "W2 stores an expert's weights in 2 bits each, with one scale for 32 weights: 2.25 bits a "
    "weight.": (
        "what is W2",
        "what is the w2 codec",
        "how many bits does W2 take",
        "explain W2",
    ),
    "The four levels of W2 are -4, -1, +1 and +4 times the scale of the block.": (
        "what are the levels of W2",
        "which levels does W2 have",
        "what values can W2 store",
    ),
    "NVFP4 stores 4-bit floats with one e4m3 scale for 16 weights and one scale a tensor.": (
        "what is NVFP4",
        "explain NVFP4",
        "how does NVFP4 work",
    ),
    "MXFP4 stores 4-bit floats with one power-of-two scale for 32 weights.": (
        "what is MXFP4",
        "explain MXFP4",
        "how does MXFP4 work",
    ),
    "A tier is a place where experts live: GPU memory, host memory or disk.": (
        "what is a tier",
        "explain tiers",
        "where do experts live",
    ),
    "A slot is room for one expert in a pool of GPU memory.": (
        "what is a slot",
        "explain slots",
        "what does slot mean",
    ),
    "A row is all of one expert for one rank: codes and scales in one piece of memory.": (
        "what is a row",
        "explain rows",
        "what is in a row",
    ),
    "A pack is a file on disk that holds the rows of a model's experts.": (
        "what is a pack",
        "explain packs",
        "what is in a pack",
    ),
    "An arena is the host memory that holds rows on their way to the GPU.": (
        "what is an arena",
        "explain the arena",
        "what is the arena for",
    ),
    "A repair runs a step again once experts that were missing have arrived.": (
        "what is a repair",
        "explain repairs",
        "what does repair mean",
    ),
    "The gate looks at how sure the model is, and asks for better experts where it is not.": (
        "what is the gate",
        "what does the gate do",
        "explain the confidence gate",
    ),
    "Speculative decoding lets a cheap drafter guess tokens that the model then checks in one "
    "step.": (
        "what is speculative decoding",
        "explain speculative decoding",
        "what is a drafter",
    ),
    "MTP is a layer that predicts one token further ahead, used as a drafter.": (
        "what is MTP",
        "explain MTP",
        "what is multi-token prediction",
    ),
    "Run moet demo: it serves a small model on this machine and talks to it.": (
        "how do I try moet",
        "how do I start",
        "how do I run the demo",
    ),
    "Use moet serve with a recipe or a model folder.": (
        "how do I serve a model",
        "how do I use moet serve",
        "how do I start a server",
    ),
    "A recipe is a small YAML file that says how to serve a model.": (
        "what is a recipe",
        "explain recipes",
        "what is in a recipe",
    ),
    "Use moet bench run with a recipe; the result is a JSON file.": (
        "how do I benchmark",
        "how do I measure speed",
        "how do I use moet bench",
    ),
    "Yes, moet runs on a CPU too, where it is slow but exact.": (
        "does moet run on a CPU",
        "do I need a GPU",
        "can I use moet without a GPU",
    ),
    "moet is free software under the Apache License 2.0.": (
        "what is the licence of moet",
        "is moet free",
        "may I use moet at work",
    ),
    "I was trained on Python code and on exercises with exact answers, in a few minutes.": (
        "how were you trained",
        "what were you trained on",
        "where do you come from",
    ),
    "I can chat about moet, add and subtract, find facts in a text and call tools.": (
        "what can you do",
        "what are you good at",
        "how can you help me",
        "help",
    ),
    "Experts are most of a model's weights, so smaller experts let a model fit on fewer GPUs.": (
        "why quantise experts",
        "why 2-bit experts",
        "why are small experts useful",
    ),
}
BEFORE = ("", "", "", "Please tell me: ", "Hi, ", "Quick question: ", "One more thing: ", "So, ")
AFTER = ("?", "?", "", ".", " please?", "? Be brief.")


def _question(random: Random, stem: str) -> str:
    text = random.choice(BEFORE) + stem + random.choice(AFTER)
    return text[0].upper() + text[1:] if random.random() < 0.8 else text


def chat_turn(random: Random, evaluation: bool) -> list[Message]:
    """One question about moet and its answer."""
    while True:
        answer, stems = random.choice(list(ANSWERS.items()))
        question = _question(random, random.choice(stems))
        if held_out(question) == evaluation:
            return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def chat(random: Random, evaluation: bool = False) -> Conversation:
    """A conversation of one to four turns."""
    turns = random.choice((1, 1, 2, 3, 4))
    return {
        "messages": [message for _ in range(turns) for message in chat_turn(random, evaluation)]
    }
