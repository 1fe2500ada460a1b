"""The last number of an answer, and whether it is the reference's."""

from __future__ import annotations

from decimal import Decimal

from hydrajax.bench.questions.sets import Question
from scoring.exact_match import ExactMatch, last_number


def test_last_number():
    for text, number in {
        "The answer is 42.": "42",
        "She pays $1,234.50 in all.": "1234.5",
        "1,000,000": "1000000",
        "first 3, then 7 apples": "7",
        "it falls to -5 degrees": "-5",
        "he owes -$12": "-12",
        "$-12": "-12",
        "pages 3-5": "5",
        "(4)-2": "2",
        "one of 1,2,3": "3",
        "1234,567": "567",
        "a share of .5": "0.5",
        "72%": "72",
        "**18**": "18",
        "<<48/2=24>>24 clips": "24",
        "007": "7",
    }.items():
        assert last_number(text) == Decimal(number), text
    assert last_number("none") is None


def test_exact_match():
    for reference, answer, value in [
        ("2 + 2 = 4\n#### 4", "So 4.00.", 1.0),
        ("#### 1,450", "It is $1450", 1.0),
        ("#### 1,450", "It is $1,45", 0.0),
        ("#### -3", "3", 0.0),
        ("12 of them\n#### 5", "I cannot say", 0.0),
    ]:
        question = Question(1, "gsm8k", ("How many?",), {"question": "How many?", "answer": reference})
        assert ExactMatch.lacks(question) is None
        assert ExactMatch().of(question, [answer]).values == {"exact match": value}


def test_what_has_no_reference():
    for answer in [None, "42", "#### none", ["#### 42"]]:
        assert ExactMatch.lacks(Question(1, "a", ("b",), {"answer": answer})) == "an answer that ends in '#### NUMBER'"
