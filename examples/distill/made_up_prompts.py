"""Prompts put together from parts: questions, code, arithmetic, summaries, lists and stories, as many as one likes.

A verifier that makes up the user's turns asks short questions; people ask for longer things. None of these is a prompt
of `benchmarks/prompts.json`.
"""

import random
from collections.abc import Sequence

PEOPLE = (
    "my neighbour", "my little brother", "a friend of mine", "my father", "my colleague", "our new trainee",
    "my aunt", "a student of mine", "my boss", "my landlord", "a retired teacher", "my flatmate", "our team",
    "my daughter",
)  # fmt: skip
WISHES = (
    "wants to start running", "is going to speak in front of a hundred people", "has trouble falling asleep",
    "wants to learn how to cook", "is moving abroad next month", "needs to save money", "wants to adopt a dog",
    "has just lost a job", "would like to read more books", "is afraid of flying", "plans a surprise party",
    "wants to grow vegetables on a balcony", "keeps forgetting appointments", "would like to learn a language",
    "wants to write a letter to an old friend", "is buying a first car", "is nervous about an exam",
    "wants to drink less coffee", "is planning a week in the mountains", "wants to learn to swim as an adult",
)  # fmt: skip
ASKED = (
    "What would you advise?", "Where should one begin?", "What should be avoided?",
    "How would you explain it to a child?", "Is there an easy way to do that?", "What do you think about it?",
    "Please give some practical tips.", "What matters most?", "Can you help with a plan?",
    "How long will it take, and what does it cost?",
)  # fmt: skip
TOPICS = (
    "why the sky is blue", "how a refrigerator works", "why leaves change colour", "how vaccines work",
    "what inflation is", "how a battery stores energy", "why the sea is salty", "how airplanes stay in the air",
    "how glass is made", "what a black hole is", "why we dream", "how the internet finds a page",
    "how cheese is made", "what causes an echo", "how a bicycle stays upright", "why cats purr",
    "how compound interest works", "what democracy means",
)  # fmt: skip
LANGUAGES = ("Python", "JavaScript", "Java", "C", "Go", "Rust", "Ruby", "TypeScript")
TASKS = (
    "reverses the words of a sentence", "counts how often each letter occurs in a text",
    "finds the second largest number", "checks whether a word is a palindrome",
    "removes duplicates from a list and keeps the order", "computes the first n Fibonacci numbers",
    "merges two sorted lists", "converts a temperature from Celsius", "returns all prime numbers below n",
    "sums the digits of a number", "sorts people by their age", "finds the most common word in a file",
    "checks whether brackets are balanced", "rotates a matrix by 90 degrees",
    "splits a list into chunks of a given size", "computes the average of a column of a CSV file",
    "generates a random password", "flattens a nested list", "measures how long a call takes",
    "validates an email address",
)  # fmt: skip
EXTRAS = (
    "Explain how it works.", "Add comments.", "Explain it in a few sentences.", "Show an example of its use.",
    "Keep it short.", "Say what could go wrong.", "Include a test.", "What is its complexity?",
)  # fmt: skip
QUERIES = (
    "all products that were never ordered", "the ten most expensive items",
    "the number of employees in each department", "customers without an address", "the average salary by city",
    "orders of the last week with their totals", "all authors with more than five books",
    "students who failed two exams or more",
)  # fmt: skip
COMMANDS = (
    "finds all files larger than a gigabyte", "counts the lines of every text file", "deletes empty folders",
    "makes a backup of a folder with the date in its name", "resizes all images",
    "prints the five newest files", "replaces a word in many files",
    "checks every minute whether a server answers",
)  # fmt: skip
GOODS = ("apples", "tickets", "notebooks", "bottles", "chairs", "books", "eggs", "stamps", "bricks", "lamps", "shirts")
PLACES = ("shop", "factory", "school", "theatre", "farm", "bakery", "museum", "library", "hotel", "garden centre")
STEPS = (
    "Show your work.",
    "Explain each step.",
    "Think about it carefully.",
    "Give the calculation.",
    "How do you get it?",
)
LISTED = (
    "ways to stay healthy in winter", "questions to ask in a job interview",
    "gifts for somebody who has everything", "games for a long train ride", "things to pack for a hike",
    "ideas for a rainy Sunday", "reasons to visit a library", "breakfasts that take five minutes",
    "mistakes that new managers make", "exercises that need no equipment", "tips for taking better photographs",
    "things to check before renting a flat", "songs themes for a school play", "ways to thank a teacher",
    "uses for old newspapers", "jobs that one can do outdoors", "plants that need little light",
    "ways to make a meeting shorter", "signs that a tyre should be replaced", "steps to plan a small wedding",
)  # fmt: skip
EACH = (
    "with one sentence about each", "with a short reason for each", "in order of importance",
    "and explain the first one", "in a few words each", "each with an example", "and say which you like best",
    "as a numbered list",
)  # fmt: skip
NUMBERS = ("three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve")
HEROES = (
    "a fisherman", "a young painter", "an old librarian", "a curious fox", "a girl with a red umbrella",
    "a lighthouse keeper", "a baker", "two brothers", "a retired pilot", "a shy dragon", "a violin maker",
    "a mountain guide", "a tired king", "a small owl", "a gardener", "an astronaut", "a train driver",
    "a boy who collects stones", "a sheep dog", "a nurse",
)  # fmt: skip
EVENTS = (
    "who finds a door in a tree", "who hears a voice in the well", "who loses the way in the snow",
    "who gets a strange letter", "who must cross a river at night", "who discovers an old map",
    "who wants to fly", "who makes friends with a ghost", "who can understand animals for one day",
    "who repairs a broken bridge", "who forgets a name", "who wins a race by mistake",
    "who keeps a secret for fifty years", "who plants the last seed in the world", "who meets a younger self",
    "who wakes up in an empty town", "who saves the village from a flood", "who sells dreams at the market",
)  # fmt: skip
TELLING = (
    "Write a short story about {}.", "Tell a bedtime story about {}.",
    "Write the first page of a novel about {}.", "Tell me about {}.", "Write a fairy tale about {}.",
    "Begin a funny story about {}.", "Write a story about {}, with a happy end.",
    "Write the opening scene of a film about {}.",
)  # fmt: skip
SUMMARIES = (
    "Summarize this in one sentence: {}", "Summarise in two sentences: {}",
    "What is the main point of this text? {}", "Put this into a few short points: {}", "Shorten this text: {}",
    "Give me the essence of the following: {}", "Write a headline and a one-sentence summary for this: {}",
)  # fmt: skip


def made_up_prompts(count: int, seed: int, passages: Sequence[str]) -> list[str]:
    """That many prompts, of all six kinds in turn.

    Args:
        count: How many.
        seed: Of the random choices.
        passages: Texts to summarize.
    """
    r = random.Random(seed)
    kinds = (_question, _code, _arithmetic, lambda r: r.choice(SUMMARIES).format(r.choice(passages)), _list, _story)
    return [kinds[number % len(kinds)](r) for number in range(count)]


def _question(r: random.Random) -> str:
    if r.random() < 0.3:
        return f"Explain to {r.choice(PEOPLE)} {r.choice(TOPICS)}. {r.choice(('', *ASKED[3:4]))}".strip()
    who, wish = r.choice(PEOPLE), r.choice(WISHES)
    return f"{who[0].upper()}{who[1:]} {wish}. {r.choice(ASKED)}"


def _code(r: random.Random) -> str:
    kind = r.random()
    if kind < 0.2:
        return f"Write an SQL query for {r.choice(QUERIES)}. {r.choice(EXTRAS)}"
    if kind < 0.4:
        return f"Write a shell script that {r.choice(COMMANDS)}. {r.choice(EXTRAS)}"
    what = r.choice(("function", "function", "program", "class"))
    return f"Write a {r.choice(LANGUAGES)} {what} that {r.choice(TASKS)}. {r.choice(EXTRAS)}"


def _arithmetic(r: random.Random) -> str:
    a, b, c, d = (r.randint(2, 60) for _ in range(4))
    goods, place = r.choice(GOODS), r.choice(PLACES)
    text = r.choice(
        (
            f"A {place} buys {a} boxes of {b} {goods} and sells {c} of them a day. For how many days do they last?",
            f"{a} {goods} cost {b} dollars. How much do {c} {goods} cost, with a discount of {d} percent?",
            f"A {place} has {a * 10} visitors on Monday and {b} percent more on Tuesday. How many is that together?",
            f"Anna has {a + b} {goods}, gives {b} to Tom and buys {c} packs of {d}. How many does she have now?",
            f"A car drives {a * 10} kilometres at {b + 20} km an hour and rests for {c} minutes. When does it arrive?",
            f"{a} people share {b * 10} {goods}. How many does each get, and how many are left over?",
        )
    )
    return f"{text} {r.choice(STEPS)}"


def _list(r: random.Random) -> str:
    verb = r.choice(("List", "Name", "Give me", "What are", "Write down"))
    text = f"{verb} {r.choice(NUMBERS)} {r.choice(LISTED)}, {r.choice(EACH)}"
    return text + ("?" if verb == "What are" else ".")


def _story(r: random.Random) -> str:
    return r.choice(TELLING).format(f"{r.choice(HEROES)} {r.choice(EVENTS)}")
