"""Prompts that come with this program, for measuring where there is no network: code, sums, explaining, writing."""

from __future__ import annotations

REFERENCE_PROMPTS = (
    "Write a Python function that returns the second largest number in a list, and explain how it works.",
    "A bakery sells 24 rolls in the morning and half as many in the afternoon. Each roll costs 3 dollars. How much "
    "money does it take in a day? Reason step by step.",
    "Explain to a ten-year-old why the moon changes its shape over a month.",
    "Write a polite letter to a neighbour whose dog barks at night.",
    "Write a Python function `is_palindrome(text: str) -> bool` that ignores spaces and upper case.",
    "A train leaves at 9:40 and arrives at 13:15. It stops twice for 10 minutes each. How long was it moving? Reason "
    "step by step.",
    "What are the main differences between a virus and a bacterium? Answer as a list.",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Write an SQL query that lists the three customers with the highest total of orders, with tables customers(id, "
    "name) and orders(id, customer_id, amount).",
    "A tank holds 120 litres. One pipe fills 8 litres a minute, another drains 3 litres a minute. When is it full? "
    "Reason step by step.",
    "Summarise the rules of chess for somebody who has never played.",
    "Plan three days in Lisbon for a family with two small children.",
    "Write a Python class for a stack with push, pop and peek, with docstrings.",
    "If 5 machines make 5 parts in 5 minutes, how long do 100 machines need for 100 parts? Reason step by step.",
    "Explain how a refrigerator works, in four sentences.",
    "Give advice to somebody who is nervous before a job interview.",
    "Write a function in JavaScript that removes duplicate values from an array and keeps their order.",
    "The sum of three consecutive whole numbers is 72. Which are they? Reason step by step.",
    "Compare electric and petrol cars in a table with five rows.",
    "Write the first paragraph of a detective novel that plays on a ship.",
    "Write a bash script that renames all .jpeg files of a folder to .jpg.",
    "A shop lowers a price of 80 dollars by 15 percent and then raises it by 10 percent. What is it then? Reason step "
    "by step.",
    "Why do we have leap years?",
    "Write a dialogue between a teacher and a pupil about why homework matters.",
)
