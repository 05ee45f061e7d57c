"""Three tasks for a language model as a classifier, and shifted forms of their texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Row = tuple[str, int]

TOPICS = {
    "money": "account_blocked apr balance bill_balance bill_due credit_limit credit_score damaged_card "
    "direct_deposit freeze_account interest_rate min_payment pay_bill pin_change routing transfer",
    "food": "calories cook_time food_last how_busy ingredient_substitution ingredients_list meal_suggestion "
    "nutrition_info recipe restaurant_reservation restaurant_reviews restaurant_suggestion",
    "travel": "book_flight book_hotel carry_on flight_status international_visa lost_luggage plug_type "
    "travel_alert travel_notification travel_suggestion vaccines",
    "cars": "gas gas_type jump_start last_maintenance mpg oil_change_how oil_change_when "
    "schedule_maintenance tire_change tire_pressure traffic",
    "work": "direct_deposit income insurance meeting_schedule next_holiday payday pto_balance pto_request "
    "pto_request_status pto_used rollover_401k schedule_meeting taxes w2",
}
GROUPS = {
    "card": "card",
    "transfer": "transfer",
    "cash": "cash",
    "deposit": "top",
    "currency": "exchange|currenc",
}
"""Label and what the names of its intents hold; an intent that fits several is left out."""


@dataclass(frozen=True)
class Task:
    """A task: labels, templates, and rows ``(text, class)`` to draw from."""

    name: str
    labels: tuple[str, ...]
    template: str
    reworded: str
    train: list[Row]
    test: list[Row]


def load_tasks(data: Path) -> dict[str, Task]:
    """The three tasks, from the files of CLINC150 and BANKING77."""
    clinc = json.loads((data / "clinc150.json").read_text(encoding="utf-8"))
    banking = json.loads((data / "banking77.json").read_text(encoding="utf-8"))
    topics = tuple(TOPICS)
    topic_of = {intent: k for k, names in enumerate(TOPICS.values()) for intent in names.split()}
    topic_of.pop("direct_deposit")  # of two topics
    groups = {i: found[0] for _, i in banking["train"] if len(found := _groups(i)) == 1}
    topic_rows = [[(t, topic_of[i]) for t, i in clinc[part] if i in topic_of] for part in ("train", "test")]
    group_rows = [[(t, groups[i]) for t, i in banking[part] if i in groups] for part in ("train", "test")]
    claims = [_claims(rows, topics) for rows in topic_rows]
    return {
        "clinc150-topics": Task(
            "clinc150-topics",
            topics,
            "Topics: {labels}.\nSentence: {text}\nTopic:",
            "Which one of these is meant: {labels}?\n\n{text}\n\nAnswer with one word:",
            *topic_rows,
        ),
        "banking77-groups": Task(
            "banking77-groups",
            tuple(GROUPS),
            "Subjects: {labels}.\nQuestion of a customer: {text}\nSubject:",
            "A customer writes to the bank: {text}\nIs it about {labels}? It is about",
            *group_rows,
        ),
        "clinc150-yes-no": Task(
            "clinc150-yes-no",
            ("no", "yes"),
            "Answer yes or no.\nSentence: {text}\nAnswer:",
            "Is this claim true?\n{text}\nSay yes or no:",
            *claims,
        ),
    }


def _groups(intent: str) -> list[int]:
    return [k for k, pattern in enumerate(GROUPS.values()) if re.search(pattern, intent.lower())]


def _claims(rows: list[Row], topics: tuple[str, ...]) -> list[Row]:
    """A claim about each sentence, true for half of them."""
    chance = random.Random(0)
    found = []
    for text, topic in rows:
        true = chance.random() < 0.5
        other = chance.choice([k for k in range(len(topics)) if k != topic])
        found.append((f"{text}\nIs it about {topics[topic if true else other]}?", int(true)))
    return found


def drawn(rows: list[Row], n: int, seed: int) -> list[Row]:
    """So many rows, classes in equal numbers as far as they go."""
    chance = random.Random(seed)
    by_class: dict[int, list[Row]] = {}
    for row in chance.sample(rows, len(rows)):
        by_class.setdefault(row[1], []).append(row)
    each = -(-n // len(by_class))
    found = [row for rows in by_class.values() for row in rows[:each]]
    return chance.sample(found, len(found))[:n]


def _upper(text: str, chance: random.Random) -> str:
    return text.upper()


def _without_vowels(text: str, chance: random.Random) -> str:
    words = text.split(" ")
    return " ".join(re.sub("(?<=.)[aeiou]", "", w) if chance.random() < 0.5 else w for w in words)


def _telegram(text: str, chance: random.Random) -> str:
    little = {
        "i",
        "a",
        "an",
        "the",
        "to",
        "my",
        "is",
        "do",
        "can",
        "me",
        "of",
        "for",
        "on",
        "you",
        "what",
        "it",
    }
    return " ".join(w for w in text.split(" ") if w.lower() not in little) or text


def _polite(text: str, chance: random.Random) -> str:
    return f"Hello there, I hope you are well. {text} Thank you so much in advance!"


def _letters_swapped(text: str, chance: random.Random) -> str:
    letters = list(text)
    for i in range(len(letters) - 1):
        if letters[i].isalpha() and letters[i + 1].isalpha() and chance.random() < 0.12:
            letters[i], letters[i + 1] = letters[i + 1], letters[i]
    return "".join(letters)


SHIFTS: dict[str, Callable[[str, random.Random], str]] = {
    "capitals": _upper,
    "vowels left out": _without_vowels,
    "telegram style": _telegram,
    "polite phrases": _polite,
    "letters swapped": _letters_swapped,
}
"""Changes of the text that are no families of augmentation."""


def shifted(rows: list[Row], name: str) -> list[Row]:
    """The rows with their texts changed."""
    chance = random.Random(name)
    return [(SHIFTS[name](text, chance), label) for text, label in rows]
