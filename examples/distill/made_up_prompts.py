"""Prompts put together from parts: questions, code, arithmetic, summaries, lists and stories, as many as one likes.

A verifier that makes up the user's turns asks short questions; people ask for longer things. None of these is a prompt
of `benchmarks/prompts.json`.
"""

import random
from collections.abc import Sequence

PEOPLE = (
    "my neighbour", "my little brother", "a friend of mine", "my father", "my colleague", "our new trainee",
    "my aunt", "a student of mine", "my boss", "my landlord", "a retired teacher", "my flatmate", "our team",
    "my daughter", "my cousin", "my mother-in-law", "a shy classmate", "my best friend", "the man next door",
    "my elder sister", "a young couple", "my grandfather", "our caretaker", "a woman at work", "my son",
    "a nurse whom I know", "my dentist", "a visitor from abroad",
)  # fmt: skip
WISHES = (
    "wants to start running", "is going to speak in front of a hundred people", "has trouble falling asleep",
    "wants to learn how to cook", "is moving abroad next month", "needs to save money", "wants to adopt a dog",
    "has just lost a job", "would like to read more books", "is afraid of flying", "plans a surprise party",
    "wants to grow vegetables on a balcony", "keeps forgetting appointments", "would like to learn a language",
    "wants to write a letter to an old friend", "is buying a first car", "is nervous about an exam",
    "wants to drink less coffee", "is planning a week in the mountains", "wants to learn to swim as an adult",
    "wants to stop biting nails", "has to give a toast at a wedding", "would like to draw portraits",
    "wants to repair an old radio", "needs a quiet place to study", "is choosing between two jobs",
    "wants to keep chickens", "has a noisy neighbour", "would like to try meditation",
    "wants to bake bread without yeast", "is learning to ride a motorbike", "wants to understand the tax form",
    "has spilled coffee on a laptop", "is looking for a flat in a big city", "wants to apologise for a harsh word",
    "would like to write poems", "cannot decide where to go on holiday", "has to wait for hours at an airport",
    "wants to build a bookshelf", "wonders whether to paint the kitchen green",
    "would like to start a small business", "has an allergy to pollen", "wants to spend less time with the phone",
    "is going to meet the parents of a girlfriend", "wants to teach a parrot some words",
    "would like to know more about the stars", "needs a present for a colleague", "wants to lose some weight",
    "has missed the last bus", "wants to learn chess", "is moving a piano to the third floor",
    "wants to volunteer at a hospital", "would like to grow tomatoes", "keeps losing keys",
    "wants to take up photography", "has found a wallet in the street", "is afraid of dogs",
    "wants to sing in a choir", "would like to sleep in a tent in winter", "has to write a speech about friendship",
)  # fmt: skip
ASKED = (
    "What would you advise?", "Where should one begin?", "What should be avoided?",
    "How would you explain it to a child?", "Is there an easy way to do that?", "What do you think about it?",
    "Please give some practical tips.", "What matters most?", "Can you help with a plan?",
    "How long will it take, and what does it cost?", "What would you do?", "What could go wrong?",
    "Which books or courses would help?", "How much time should one plan for it?",
    "What would be a good first step for today?", "Is that a good idea?", "What should one know before?",
    "How can I help?", "Can you suggest two or three possibilities?", "What do most people forget?",
)  # fmt: skip
TOPICS = (
    "why the sky is blue", "how a refrigerator works", "why leaves change colour", "how vaccines work",
    "what inflation is", "how a battery stores energy", "why the sea is salty", "how airplanes stay in the air",
    "how glass is made", "what a black hole is", "why we dream", "how the internet finds a page",
    "how cheese is made", "what causes an echo", "how a bicycle stays upright", "why cats purr",
    "how compound interest works", "what democracy means", "how a compass works", "why ice floats",
    "how bees make honey", "what an algorithm is", "how a microwave heats food", "why the moon has phases",
    "what makes thunder", "how paper is recycled", "how a parliament passes a law", "why onions make us cry",
    "what gravity is", "how submarines dive", "how a camera takes a picture", "why metal feels colder than wood",
    "what a virus does in a cell", "how birds find their way", "why we yawn", "how a piano makes its sound",
    "how a bank earns money", "what DNA is", "how tides come about", "why deserts are cold at night",
    "how soap cleans", "what a password manager does", "how a vacuum flask keeps tea warm", "why stars twinkle",
    "what insurance is for", "how a lock on a canal works", "why apples turn brown", "how earthquakes are measured",
    "how a touch screen notices a finger", "what a leap year is for", "how rubber is made",
    "why some people are left-handed", "what an encyclopedia is", "how a solar panel works", "how spiders spin",
    "what makes a good teacher", "why languages change", "how chocolate is made",
)  # fmt: skip
EXPLAINED = ("", "Keep it short.", "Use a comparison from everyday life.", "Do it as you would for a child.")
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
    "validates an email address", "converts Roman numerals to numbers", "finds the longest word in a text",
    "counts the vowels of a string", "computes the greatest common divisor of two numbers",
    "reads a file and prints its lines in reverse order", "checks whether a year is a leap year",
    "finds all pairs of numbers with a given sum", "computes the factorial of a number",
    "rounds prices to the nearest five cents", "simulates rolling two dice", "searches a sorted list by halving it",
    "translates a text into Morse code", "builds a dictionary from two lists", "removes all HTML tags from a text",
    "finds the common elements of two lists", "turns snake case into camel case",
    "computes the distance between two points", "draws a triangle of stars", "counts down from ten",
    "sorts words by their length", "inserts a node into a linked list", "walks through a binary tree",
    "groups anagrams", "parses a date such as 2024-05-01", "computes the median of a list",
    "finds missing numbers in a sequence", "encrypts a text by shifting its letters", "keeps a to-do list",
    "prints a multiplication table", "downloads a web page and counts its links", "transposes a table",
    "computes compound interest", "replaces tabs by spaces", "plays rock, paper, scissors",
    "limits a value to a range", "stores and withdraws money of an account",
    "checks whether two strings are rotations of each other", "reports the largest files in a folder",
)  # fmt: skip
EXTRAS = (
    "Explain how it works.", "Add comments.", "Explain it in a few sentences.", "Show an example of its use.",
    "Keep it short.", "Say what could go wrong.", "Include a test.", "What is its complexity?", "Explain every line.",
    "Use no libraries.", "Describe the idea first.", "Give the expected output.", "Use good names.",
    "Handle wrong input.", "Explain it in three sentences.", "Write it for beginners.",
)  # fmt: skip
QUERIES = (
    "all products that were never ordered", "the ten most expensive items",
    "the number of employees in each department", "customers without an address", "the average salary by city",
    "orders of the last week with their totals", "all authors with more than five books",
    "students who failed two exams or more", "the three cities with the most customers",
    "employees who earn more than their manager", "products whose price rose this year",
    "the number of visits per day", "all rooms that are free tomorrow", "users who never logged in",
    "the total weight of each shipment", "books that are borrowed twice a month", "the youngest player of each team",
    "duplicate email addresses",
)  # fmt: skip
COMMANDS = (
    "finds all files larger than a gigabyte", "counts the lines of every text file", "deletes empty folders",
    "makes a backup of a folder with the date in its name", "resizes all images", "prints the five newest files",
    "replaces a word in many files", "checks every minute whether a server answers",
    "prints the free space of every disk", "moves pictures into folders by year",
    "counts how often each word occurs in a log", "adds a number in front of each file name",
    "compresses logs that are older than a week", "lists the users who are logged in",
    "converts all names to lower case", "stops a program that uses too much memory", "downloads a list of addresses",
    "tells the day of the week of a date",
)  # fmt: skip
GOODS = (
    "apples", "tickets", "notebooks", "bottles", "chairs", "books", "eggs", "stamps", "bricks", "lamps", "shirts",
    "pencils", "roses", "cups", "candles", "cakes", "balls", "sandwiches", "posters", "coins", "shells", "bags",
)  # fmt: skip
PLACES = (
    "shop", "factory", "school", "theatre", "farm", "bakery", "museum", "library", "hotel", "garden centre", "market",
    "cinema", "workshop", "kindergarten", "zoo", "harbour", "post office", "restaurant", "club", "warehouse",
)  # fmt: skip
STEPS = (
    "Show your work.",
    "Explain each step.",
    "Think about it carefully.",
    "Give the calculation.",
    "How do you get it?",
)
LISTED = (
    "ways to stay healthy in winter", "questions to ask in a job interview", "gifts for somebody who has everything",
    "games for a long train ride", "things to pack for a hike", "ideas for a rainy Sunday",
    "reasons to visit a library", "breakfasts that take five minutes", "mistakes that new managers make",
    "exercises that need no equipment", "tips for taking better photographs", "things to check before renting a flat",
    "songs themes for a school play", "ways to thank a teacher", "uses for old newspapers",
    "jobs that one can do outdoors", "plants that need little light", "ways to make a meeting shorter",
    "signs that a tyre should be replaced", "steps to plan a small wedding", "hobbies for people who sit all day",
    "animals that sleep in winter", "rules for a shared kitchen", "ways to calm a crying baby",
    "things to do on a first day at work", "inventions that changed the world", "ways to learn new words",
    "places to hide a birthday present", "topics for small talk", "reasons to keep a diary",
    "healthy snacks for children", "ways to reuse glass jars", "things that make a good neighbour",
    "songs to sing at a camp fire", "ways to say no politely", "steps to clean an oven", "simple magic tricks",
    "problems of big cities", "qualities of a good leader", "ways to make a room look larger", "famous bridges",
    "foods with a lot of iron", "things to ask a doctor", "ways to remember names", "tools that every home needs",
    "countries that begin with the letter S", "ways to save water in the garden", "good habits for the evening",
    "sports that two people can play", "materials that carry electricity", "stretches for a stiff neck",
    "things that can go wrong at a wedding", "ways to make history lessons interesting", "drinks without sugar",
    "arguments for and against school uniforms", "fruits that grow in cold countries", "jobs that robots may do",
    "ideas for a charity event", "first sentences for a letter of complaint",
    "things that children should learn before school",
)  # fmt: skip
EACH = (
    "with one sentence about each", "with a short reason for each", "in order of importance",
    "and explain the first one", "in a few words each", "each with an example", "and say which you like best",
    "as a numbered list", "with a typical price", "in one line each", "and add a warning where it is needed",
    "for beginners", "starting with the easiest", "with what speaks against each", "in short sentences",
    "and give a reason for the last one",
)  # fmt: skip
NUMBERS = ("three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve")
HEROES = (
    "a fisherman", "a young painter", "an old librarian", "a curious fox", "a girl with a red umbrella",
    "a lighthouse keeper", "a baker", "two brothers", "a retired pilot", "a shy dragon", "a violin maker",
    "a mountain guide", "a tired king", "a small owl", "a gardener", "an astronaut", "a train driver",
    "a boy who collects stones", "a sheep dog", "a nurse", "a postwoman", "a blind musician", "a lazy cat",
    "a girl who never speaks", "a scarecrow", "a taxi driver", "an old sailor", "a mouse with big plans", "a judge",
    "a little cloud", "twin sisters", "a chess player", "an inventor", "a goose", "a night watchman",
    "a princess who hates dancing", "a carpenter", "a teacher of dead languages", "a stubborn donkey",
    "a magician without luck",
)  # fmt: skip
EVENTS = (
    "who finds a door in a tree", "who hears a voice in the well", "who loses the way in the snow",
    "who gets a strange letter", "who must cross a river at night", "who discovers an old map", "who wants to fly",
    "who makes friends with a ghost", "who can understand animals for one day", "who repairs a broken bridge",
    "who forgets a name", "who wins a race by mistake", "who keeps a secret for fifty years",
    "who plants the last seed in the world", "who meets a younger self", "who wakes up in an empty town",
    "who saves the village from a flood", "who sells dreams at the market", "who takes the wrong train",
    "who finds a message in a bottle", "who has to give a speech", "who builds a boat in the attic",
    "who meets a talking statue", "who cannot stop laughing", "who inherits a castle", "who is the only one awake",
    "who looks for a lost colour", "who teaches a bear to read", "who sees the same stranger every day",
    "who lives under a bridge for a year", "who collects shadows", "who must choose between two promises",
    "who digs a very deep hole", "who hides from the rain in a cinema", "who is invited to the moon",
    "who receives a visit from the future", "who repairs hearts", "who hears the trees talk about the war",
)  # fmt: skip
TELLING = (
    "Write a short story about {}.", "Tell a bedtime story about {}.", "Write the first page of a novel about {}.",
    "Tell me about {}.", "Write a fairy tale about {}.", "Begin a funny story about {}.",
    "Write a story about {}, with a happy end.", "Write the opening scene of a film about {}.",
    "Write a letter by {}.", "What happens to {}? Tell it in a few paragraphs.", "Invent a legend about {}.",
    "Write a sad story about {}.", "Write a diary entry of {}.", "Please tell my children a story about {}.",
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
        return f"Explain to {r.choice(PEOPLE)} {r.choice(TOPICS)}. {r.choice(EXPLAINED)}".strip()
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
            f"A {place} opens for {c} days and sells {a} {goods} on each. Of {b * 50}, how many remain?",
            f"Tom reads {a} pages a day. His book has {b * 10} pages. How many days does he need, and how many pages "
            f"are left for the last one?",
            f"A rectangle is {a} metres long and {b} metres wide. What are its area and the length of its fence?",
            f"A train leaves at 8:{c:02d} and needs {a * 5} minutes. When does it arrive?",
            f"In a class of {a + b} pupils, {a} have a pet. What part of the class is that, in percent?",
            f"A {place} mixes {a} litres of juice with {b} litres of water. How many glasses of {d / 10:.1f} litres "
            f"does that fill?",
            f"Lisa earns {a} dollars an hour and works {b} hours. She spends {c} dollars. How much can she save?",
            f"{goods[0].upper()}{goods[1:]} weigh {a * 10} grams each. How many kilograms do {b} of them weigh?",
            f"The price of {goods} rises from {a} to {a + b} dollars. By how many percent is that?",
            f"One machine makes {a} {goods} an hour, another one {b}. How long do both need for {c * 20}?",
        )
    )
    return f"{text} {r.choice(STEPS)}"


def _list(r: random.Random) -> str:
    verb = r.choice(("List", "Name", "Give me", "What are", "Write down"))
    text = f"{verb} {r.choice(NUMBERS)} {r.choice(LISTED)}, {r.choice(EACH)}"
    return text + ("?" if verb == "What are" else ".")


def _story(r: random.Random) -> str:
    return r.choice(TELLING).format(f"{r.choice(HEROES)} {r.choice(EVENTS)}")
