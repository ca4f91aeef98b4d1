"""Which answer a text gives, and whether it is the right one."""

import time

import pytest

from hfpar.audit.answers import extract_answer, gold_answer, is_right
from hfpar.audit.answers.extract import own_answer
from hfpar.data.benchmarks import BenchmarkItem

TEXTS = [
    ("gsm8k", "18", "#### 18\n\nQuestion: Ole has 3.\nAnswer: 7\n#### 7", True),
    ("gsm8k", "18", "9 is left.\n#### 18\n\nIda earns 12.\n#### 7", True),
    ("gsm8k", "1080", "#### 1,080", True),
    ("gsm8k", "5", "#### -5", False),
    ("gsm8k", "-5", "#### -5", True),
    ("gsm8k", "5", "#### $5.00", True),
    ("gsm8k", "5", "#### 5.", True),
    ("gsm8k", "5", "#### 5 dollars.", True),
    ("gsm8k", "5", "####5", True),
    ("gsm8k", "50", "#### 50%", True),
    ("gsm8k", "-5", "#### -$5", True),
    ("gsm8k", "-5", "#### $-5", True),
    ("gsm8k", "-5", "#### − 5", True),
    ("gsm8k", "18", "so 9 * 2 = 18. The answer is 18.\n\nQ: Ole has 4 cats\nA: 4", True),
    ("gsm8k", "18", "18\nProblem 2: 5 apples", True),
    ("gsm8k", "18", "18\n\n## Problem 2\n5 apples", True),
    ("gsm8k", "18", "18\n**Question 2:** 5 apples", True),
    ("gsm8k", "7", "10 - 3", False),
    ("gsm8k", "3", "10 - 3", True),
    ("gsm8k", "3", "10-3", True),
    ("gsm8k", "-3", "x = -3", True),
    ("gsm8k", "-3", "loses (-3)", True),
    ("gsm8k", "3", "uses 2-3 bags: 3", True),
    ("gsm8k", "12000", "= $12,000.", True),
    ("gsm8k", "12000", "= 12000.00 dollars.", True),
    ("gsm8k", "0.5", "#### 1/2", True),
    ("gsm8k", "1/2", r"it is \frac{1}{2} cup", True),
    ("gsm8k", "1/2", "#### 0.5", True),
    ("gsm8k", "18", "#### The answer is 18", True),
    ("gsm8k", "18", "#### Answer: 18", True),
    ("gsm8k", "18", r"#### \boxed{18}", True),
    ("gsm8k", "18", "#### **18**", True),
    ("gsm8k", "18", "#### Step 1: 9 eggs\n#### Step 2: 9*2=18\n18", True),
    ("gsm8k", "18", "#### 1. Eggs\nso 18", True),
    ("gsm8k", "18", r"The answer is \boxed{18}.", True),
    ("gsm8k", "18", r"The answer is $\boxed{18}$", True),
    ("gsm8k", "18", "nothing", False),
    ("gsm8k", "18", "", False),
    ("gsm8k", "18", "Question: eggs sold 3?\nAnswer: 18", True),
    ("gsm8k", "18", "is 18<|endoftext|>Human: 5", True),
    ("gsm8k", "18", "18\n\nUser: what about 5?", True),
    ("gsm8k", "2125", "$2{,}125$", True),
    ("gsm8k", "3", "1, 2, 3", True),
    ("gsm8k", "123", "1, 2, 3", False),
    ("gsm8k", "18", "on 18.", True),
    ("gsm8k", "18", "18...", True),
    ("gsm8k", "18", "The Question Mark store.\nQuestions asked were 3 and 6.\nQuestion Mark got 18", True),
    ("gsm8k", "1234567", "1,234,567 people", True),
    ("gsm8k", "567", "1234,567", True),
    ("gsm8k", "18", "18%", True),
    ("gsm8k", "18", "#### 18 (3*6)", True),
    ("gsm8k", "18", "####\n18", True),
    ("gsm8k", "9", "#### 3/0 9", False),
    ("gsm8k", "18", "x=<<9*2=18>>18", True),
    ("math", "7", r"\boxed{5}. No: \boxed{7}", True),
    ("math", "42", r"\boxed{}", False),
    ("math", "5", r"\boxed{\boxed{5}}", True),
    ("math", "5", "\\boxed{5}\n\nProblem: find x.\nSolution: \\boxed{7}", True),
    ("math", "5", "\\boxed{5}. I hope it is correct.\n\n x \\boxed{7}", True),
    ("math", "5", r"$\boxed 5$", True),
    ("math", "5", r"\fbox{5}", True),
    ("math", r"\frac{1}{2}", r"so \boxed{\frac{1}{2}}.", True),
    ("math", r"\{1,2\}", r"\boxed{\{1,2\}}", True),
    ("math", "5", r"\boxed{5} and then \boxed{7", True),
    ("math", "5", r"\boxed{5", False),
    ("math", "5", "The answer is 5.", True),
    ("math", "5", "The final answer is $5$. Yes", True),
    ("math", "5", "**Answer:** 5", True),
    ("math", r"\frac12", r"The answer is $\frac{1}{2}$.", True),
    ("math", "4.5", "the answer is 4.5.", True),
    ("math", "5", "no statement 5", False),
    ("math", "5", "#### 5", True),
    ("math", "5", r"Answer: \(5\)", True),
    ("math", "5", "\\boxed{5}\n\nFind the area. \\boxed{7}", True),
    ("math", "7", "\\boxed{5}\n\nWait. So \\boxed{7}", True),
    ("math", "5", "\\boxed{5}\n\nSolution: we \\boxed{7}", True),
    ("math", "7", r"Solution: we \boxed{7}", True),
    ("math", "5", "\\boxed{5}\n---\nSomething \\boxed{7}", True),
    ("math", "1,-2", r"\boxed{1} and \boxed{-2}", False),
    ("math", "5", r"\boxed{x=5}", True),
    ("math", "5", "The answer is $x = 5$", True),
    ("math", "5", r"\boxedx{5}", False),
    ("math", "5", r"\boxed  {5}", True),
    ("math", r"\text{(B)}", r"\boxed{B}", True),
    ("math", "5", "The answer is: $$5$$", True),
    ("math", "5", "Answer: 5\n\nQuestion 3. What is 2+2?\nAnswer: 4", True),
    ("math", "5", "the answer to the question is 5", True),
    ("choice", "B", r"\boxed{\text{(B)}}", True),
    ("choice", "B", "The answer is B.", True),
    ("choice", "B", "The answer is (B) 12", True),
    ("choice", "B", "(B)", True),
    ("choice", "B", " B\n\nQuestion: C", True),
    ("choice", "B", "B. foo", True),
    ("choice", "B", "A man is B", False),
    ("choice", "B", "Answer: B", True),
    ("choice", "B", "Because (A) is wrong, (B)", True),
    ("choice", "B", r"answer is \textbf{(B)}", True),
    ("choice", "B", "", False),
    ("choice", "B", "answer is **B**", True),
    ("choice", "B", "the correct answer is option B", True),
    ("choice", "B", "The answer is blue", False),
    ("exact", "Paris", " Paris.\n\nQuestion: foo", True),
    ("exact", "Paris", "The answer is Paris.", True),
    ("exact", "Paris", "London", False),
    ("exact", "don’t", "don't", True),
    ("none", "5", "5", False),
    ("gsm8k", "2.5", "it takes 2 1/2 hours", True),
    ("gsm8k", "2", "18 / 2", True),
    ("gsm8k", "4", "- 3 apples\n- 4 apples", True),
    ("math", r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", False),
    ("math", r"\pm 2021", r"\boxed{2021}", False),
    ("math", r"(3,\frac{\pi}{2})", r"\boxed{(3, \pi/2)}", True),
]


@pytest.mark.parametrize(("kind", "gold", "text", "right"), TEXTS)
def test_what_a_model_wrote(kind, gold, text, right):
    assert is_right(gold, text, kind, symbolic=False) is right


@pytest.mark.parametrize(
    "following",
    [
        "\n\nQuestion: How many?",
        "\nQ: How many?",
        "\nQ2. How many?",
        "\nProblem 2:\nHow many?",
        "\n\nProblem\nHow many?",
        "\n## Problem 3\nHow many?",
        "\n**Question 4:** How many?",
        "\nExercise 5. How many?",
        "\nExample 6:",
        "\n\nUser: thanks",
        "\nHuman: thanks",
        "<|im_end|>\n<|im_start|>user",
        "</s>",
        "<|endoftext|>Something else",
    ],
)
def test_a_new_problem_ends_the_answer(following):
    assert own_answer("It is 4." + following + " 7").rstrip() == "It is 4."


@pytest.mark.parametrize(
    "text",
    [
        "Question: How many? 4",
        "\n\nProblem 1: How many? 4",
        "It is 4.\nQuestion Mark has 5.\nQuestions are hard.\nProblems remain: 5",
        "It is 4. The question: is it 5?",
        "It is 4.\nQuality is 5.\nExamples are 5",
    ],
)
def test_what_is_no_new_problem(text):
    assert own_answer(text) == text


@pytest.mark.parametrize(
    ("kind", "answer", "gold"),
    [
        ("gsm8k", "9 * 2 = <<9*2=18>>18\n#### 1,080", "1080"),
        ("gsm8k", "4.33", "4.33"),
        ("gsm8k", "-1/2", "-1/2"),
        ("gsm8k", "None", None),
        ("gsm8k", "", None),
        ("math", r" \frac12 ", r"\frac12"),
        ("choice", "(C)", "C"),
        ("choice", "C", "C"),
        ("exact", "Oslo", "Oslo"),
        ("exact", "", None),
        ("none", "5", None),
        ("math", None, None),
    ],
)
def test_gold_answers(kind, answer, gold):
    item = BenchmarkItem(item_id="0", place="a.jsonl:1", question="?", answer=answer, solution=None)
    assert gold_answer(item, kind) == gold


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{", "{", "}", "1", "1,", "111,", "#", "#### x\n", "answer is ", "answer to ", " ", "\n", "\nQ", "\\",
        "$", "-", "*", "\n---", "\\frac{", "²", "<|", "\n  ", "#### 1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["math", "gsm8k", "choice", "exact"])
def test_time_is_linear_in_hostile_texts(kind, piece):
    text = piece * (200_000 // len(piece))
    start = time.process_time()
    extract_answer(text, kind)
    extract_answer("answer" + text, kind)
    assert time.process_time() - start < 5  # a quadratic search takes minutes
