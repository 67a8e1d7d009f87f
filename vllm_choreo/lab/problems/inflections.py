# SPDX-License-Identifier: Apache-2.0
"""Simple inflections of English nouns and verbs."""

from __future__ import annotations

from functools import cache

# What no rule gives: past forms, and plurals.
_IRREGULAR = {
    word: tuple(forms.split(","))
    for word, _, forms in (
        entry.partition(":")
        for entry in """
        beat:beaten become:became begin:began,begun bend:bent bite:bit,bitten blow:blew,blown
        break:broke,broken bring:brought build:built burn:burnt buy:bought catch:caught
        choose:chose,chosen come:came creep:crept deal:dealt dig:dug do:did,done draw:drew,drawn
        drink:drank,drunk drive:drove,driven eat:ate,eaten fall:fell,fallen feed:fed feel:felt
        fight:fought find:found fly:flew,flown forget:forgot,forgotten freeze:froze,frozen
        get:got,gotten give:gave,given go:went,gone grind:ground grow:grew,grown hang:hung
        have:had,has hear:heard hide:hid,hidden hold:held keep:kept kneel:knelt know:knew,known
        lay:laid lead:led lean:leant leap:leapt leave:left lend:lent lie:lay,lain,lying light:lit
        lose:lost make:made mean:meant meet:met pay:paid ride:rode,ridden ring:rang,rung
        rise:rose,risen run:ran say:said see:saw,seen sell:sold send:sent shake:shook,shaken
        shine:shone shoot:shot shrink:shrank,shrunk sing:sang,sung sink:sank,sunk sit:sat
        sleep:slept slide:slid speak:spoke,spoken spend:spent spin:spun spring:sprang,sprung
        stand:stood steal:stole,stolen stick:stuck sting:stung strike:struck sweep:swept
        swim:swam,swum swing:swung take:took,taken teach:taught tear:tore,torn tell:told
        think:thought throw:threw,thrown tie:tying understand:understood wake:woke,woken
        wear:wore,worn weave:wove,woven weep:wept win:won wind:wound write:wrote,written
        child:children foot:feet goose:geese man:men mouse:mice ox:oxen person:people tooth:teeth
        woman:women be:am,is,are,was,were,been die:dying
        """.split()
    )
}
_VOWELS = "aeiou"


@cache
def inflections(word: str) -> frozenset[str]:
    """`word` and its inflected forms, all in lower case: plurals, -s, -ed, -ing, irregular ones.

    Forms that do not exist may be among them ("writed"); other words derived from `word`, as
    "writer", are not.
    """
    endings = ("s", "es", "ed", "d", "ing")
    forms = {word, *(word + ending for ending in endings), *_IRREGULAR.get(word, ())}
    stem, last = word[:-1], word[-1:]
    if last == "y" and stem[-1:] not in _VOWELS:
        forms |= {stem + "ies", stem + "ied"}
    if last == "e":
        forms.add(stem + "ing")
    if last == "f" or word.endswith("fe"):
        forms.add(word.removesuffix("e").removesuffix("f") + "ves")
    if len(word) > 2 and last not in _VOWELS + "wxy" and word[-2] in _VOWELS:
        forms |= {word + last + "ed", word + last + "ing"}
    for suffix in ("man", "child"):  # fireman, grandchild
        if word.endswith(suffix):
            forms |= {word.removesuffix(suffix) + form for form in _IRREGULAR[suffix]}
    return frozenset(forms)
