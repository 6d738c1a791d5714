"""What the demo asks its models. Short questions with answers of some length, of six kinds."""

PROMPTS: dict[str, str] = {
    "chat": "What are the main differences between living in a big city and living in a small village?",
    "code": "Write a Python function that checks whether a word is a palindrome, and explain how it works.",
    "list": "List ten things to pack for a week of hiking in the mountains, with one reason for each.",
    "arithmetic": (
        "A baker sells 24 loaves a day at 3 dollars each and spends 30 dollars a day on flour. "
        "How much does she earn in a week? Think step by step."
    ),
    "summary": (
        "Summarize in three sentences: Honey bees live in colonies of up to sixty thousand workers and one queen. "
        "Workers collect nectar and pollen, and tell each other where flowers are by dancing. In winter the colony "
        "stays in the hive, eats the honey it has stored, and keeps the queen warm. Farmers depend on bees, because "
        "a third of all crops need pollination, yet many colonies have been lost to pesticides and parasites."
    ),
    "story": "Tell me a short story about a lighthouse keeper who finds a message in a bottle.",
}
