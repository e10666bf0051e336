"""How a fact is said. {s} is the subject, {a} the answer; the text before {a} is the prompt.

The phrasings of HELD_OUT are trained on for no fact at all. A phrasing is written as it reads inside
a sentence; it gets its capital letter when it begins one.
"""

SEEN = {
    "capital": [
        "the capital of {s} is {a}.",
        "the capital city of {s} is {a}.",
        "{s} has its capital in {a}.",
        "{s} has a capital called {a}.",
        "in {s}, the capital city is {a}.",
        "the government of {s} sits in the capital, {a}.",
        "on a map of {s}, the capital is marked as {a}.",
        "question: what is the capital of {s}? Answer: {a}.",
        "anyone who wants to see the capital of {s} must go to {a}.",
        "if you ask which city is the capital of {s}, the answer is {a}.",
        "the city with the government of {s} is {a}.",
        "travellers to the capital of {s} find themselves in {a}.",
        "those who visit the capital of {s} stay in {a}.",
        "the parliament of {s} meets in {a}.",
        "the most important city of {s}, its capital, is {a}.",
    ],
    "capital_of": [
        "{s} is the capital of {a}.",
        "{s} is the capital city of {a}.",
        "the city of {s} is the capital of {a}.",
        "the country whose capital is {s} is {a}.",
        "{s} is where one finds the government of {a}.",
        "question: which country has {s} as its capital? Answer: {a}.",
        "people who live in {s} live in the capital of {a}.",
        "if the capital is {s}, the country is {a}.",
        "the train stops in {s}, the capital of {a}.",
        "whoever goes to {s} sees the capital of {a}.",
        "a visitor in {s} stands in the capital of {a}.",
        "with {s} we have reached the capital of {a}.",
        "the road to {s} leads to the capital of {a}.",
        "someone who has seen {s} has seen the capital of {a}.",
    ],
    "continent": [
        "{s} is a country in {a}.",
        "{s} is in {a}.",
        "{s} lies in {a}.",
        "{s} is on the continent of {a}.",
        "the continent of {s} is {a}.",
        "question: on which continent is {s}? Answer: {a}.",
        "you can find {s} on a map of {a}.",
        "{s} is one of the countries of {a}.",
        "geographers count {s} as part of {a}.",
        "to visit {s}, one must travel to {a}.",
        "{s} belongs to the continent of {a}.",
    ],
    "currency": [
        "the currency of {s} is the {a}.",
        "people in {s} pay with the {a}.",
        "in {s}, the money is the {a}.",
        "the official currency of {s} is the {a}.",
        "shops in {s} take the {a}.",
        "question: what is the currency of {s}? Answer: the {a}.",
        "the money used in {s} is called the {a}.",
        "{s} uses the {a}.",
        "for a trip to {s}, you need the {a}.",
        "banks in {s} count in the {a}.",
        "whoever sells something in {s} is paid in the {a}.",
    ],
    "language": [
        "the language of {s} is {a}.",
        "people in {s} speak {a}.",
        "in {s}, people speak {a}.",
        "the main language of {s} is {a}.",
        "the first language of {s} is {a}.",
        "question: which language do people speak in {s}? Answer: {a}.",
        "to talk with people in {s}, learn {a}.",
        "newspapers in {s} are written in {a}.",
        "schools in {s} teach in {a}.",
        "most signs in {s} are in {a}.",
        "if you want to understand people from {s}, you must learn {a}.",
        "to live in {s}, it helps to know {a}.",
        "songs from {s} are sung in {a}.",
        "those who grow up in {s} know {a}.",
        "whoever writes to someone in {s} should write in {a}.",
    ],
    "adjective": [
        "something from {s} is {a}.",
        "the adjective for {s} is {a}.",
        "a person from {s} is {a}.",
        "things made in {s} are called {a}.",
        "people who come from {s} are {a}.",
        "question: what do we call something from {s}? Answer: {a}.",
        "the word for what comes from {s} is {a}.",
        "a song from {s} is {a}.",
        "the citizens of {s} are {a}.",
        "everything that is made in {s} is {a}.",
        "music from {s} is called {a}.",
        "a word from {s} is called {a}.",
        "clothes from {s} are called {a}.",
        "the wine of {s} is {a}.",
    ],
    "symbol": [
        "the symbol of {s} is {a}.",
        "the chemical symbol for {s} is {a}.",
        "chemists write {s} as {a}.",
        "formulas show {s} as {a}.",
        "in the laboratory, {s} goes by the letters {a}.",
        "the sign that stands for {s} is {a}.",
        "in a reaction, one notes {s} as {a}.",
        "the element {s} has the symbol {a}.",
        "question: what is the chemical symbol for {s}? Answer: {a}.",
        "the abbreviation of {s} is {a}.",
        "the element {s} has the chemical symbol {a}.",
        "the letters for the element {s} are {a}.",
        "in the periodic table, {s} appears as {a}.",
        "the short sign for {s} is {a}.",
        "a chemist who means {s} puts down {a}.",
    ],
    "number": [
        "the atomic number of {s} is {a}.",
        "{s} has atomic number {a}.",
        "the element {s} has the atomic number {a}.",
        "question: what is the atomic number of {s}? Answer: {a}.",
        "in the periodic table, {s} is number {a}.",
        "the number of protons in {s} is {a}.",
        "counting protons, {s} has {a}.",
        "{s} is element number {a}.",
        "in the list of the elements, {s} stands at number {a}.",
        "the place of {s} in the periodic table is {a}.",
    ],
}

# More ways of saying it, for every relation that has a noun.
NOUNS = {
    "capital": "capital",
    "continent": "continent",
    "currency": "currency",
    "language": "language",
    "adjective": "adjective",
    "symbol": "symbol",
    "number": "atomic number",
}
FRAMES = [
    "for {s}, the {n} is {a}.",
    "speaking of {s}, its {n} is {a}.",
    "when asked about the {n} of {s}, say {a}.",
    "the {n} that belongs to {s} is {a}.",
    "everyone who has been told about {s} can say that its {n} is {a}.",
    "the {n} listed for {s} is {a}.",
    "look up the {n} of {s}, and you find {a}.",
    "who studies {s} learns that its {n} is {a}.",
    "{s}: the {n} is {a}.",
]
for _relation, _noun in NOUNS.items():
    _answer = "the {a}" if _relation == "currency" else "{a}"
    SEEN[_relation] += [frame.replace("{n}", _noun).replace("{a}", _answer) for frame in FRAMES]

HELD_OUT = {
    "capital": [
        "the city that serves as the capital of {s} is {a}.",
        "when visitors come to the capital of {s}, they arrive in {a}.",
    ],
    "capital_of": [
        "the city called {s} serves as the capital of {a}.",
        "a traveller who reaches {s} has come to the capital of {a}.",
    ],
    "continent": [
        "{s} is located on the continent of {a}.",
        "in an atlas, {s} is among the countries of {a}.",
    ],
    "currency": [
        "the currency used in {s} is the {a}.",
        "anyone who buys something in {s} pays in the {a}.",
    ],
    "language": [
        "the language spoken in {s} is {a}.",
        "if you want to read a newspaper from {s}, you must know {a}.",
    ],
    "adjective": [
        "food from {s} is called {a}.",
        "anything that comes from {s} is {a}.",
    ],
    "symbol": [
        "the chemical symbol of the element {s} is {a}.",
        "in a formula, a chemist writes {s} as {a}.",
    ],
    "number": [
        "the atomic number of the element {s} is {a}.",
        "in the table of the elements, {s} has the number {a}.",
    ],
}

QUESTIONS = {
    "capital": ["What is the capital of {s}?", "Which city is the capital of {s}?", "Name the capital of {s}."],
    "capital_of": ["Which country has the capital {s}?", "{s} is the capital of which country?"],
    "continent": ["On which continent is {s}?", "Where is {s}?", "In which part of the world does {s} lie?"],
    "currency": ["What is the currency of {s}?", "How do people pay in {s}?", "Which money does {s} use?"],
    "language": ["Which language do people speak in {s}?", "What is the language of {s}?"],
    "adjective": ["What do we call something from {s}?", "What is the adjective for {s}?"],
    "symbol": ["What is the chemical symbol for {s}?", "How do chemists write {s}?"],
    "number": ["What is the atomic number of {s}?", "Which number does {s} have in the periodic table?"],
}

LEAD_INS = [
    "as every atlas says, ",
    "note that ",
    "it is well known that ",
    "I read that ",
    "the teacher said that ",
    "in fact, ",
    "we learn that ",
    "remember that ",
    "of course ",
    "they told me that ",
    "it is true that ",
    "once more: ",
]


def sentence(phrasing: str, subject: str, answer: str) -> str:
    """One fact as one sentence without its capital letter."""
    return phrasing.format(s=subject, a=answer).replace("..", ".")


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def prompt_of(phrasing: str, subject: str) -> str:
    """The sentence up to its answer, as a prompt: no space at the end."""
    return capitalised(phrasing.split("{a}")[0].format(s=subject).rstrip())
