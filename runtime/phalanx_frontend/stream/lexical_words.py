"""Word lists of the lexical guard, written for it: English only."""


def _groups(text: str) -> list[list[str]]:
    return [group.split() for group in text.split(";")]


def _first_of(text: str) -> dict[str, str]:
    """Returns the first word of the group of each word."""
    return {word: group[0] for group in _groups(text) for word in group}


FOREIGN = frozenset(
    """el la los las del que en un una por para con como es se su al der die das und ist ein eine einen zu wie nicht mit von
    auf den dem im ich sind wo warum le les des est et du pour dans une qui je sur pas il di che per non sono il gli
    della het een van ik niet zijn wat hoe op os um uma nao da dos das ao em jest nie sie jak co na czy og er det som
    ikke att och inte har pa""".split()
)
"""Frequent words of other languages in Latin script."""

STOPWORDS = frozenset(
    """a an the this that these those there here it its i you he she we they me my mine your yours our us them their his her
    one's is are am was were be been being do does did done doing has have had having will would shall should can could
    may might must let of in on at to for from by with about as and or if then so than into onto through via over under
    during between but also too what which who whose whom when where why how whether s re ve ll d m t please tell show
    give get gets say says like want need know find explain way ways kind name names called amount thing things
    someone anyone people person some any more very really quite just now ok thanks hello hi hey beneath below
    above among around across near since until best good well right possible compute calculate convert determine per
    allowed able long much many often far go goes come comes use uses using used take takes make makes mean means count
    counts look looks lies located bring brings brought require requires required happen happens because although while
    instead""".split()
)
"""Frequent words of English."""

NUMBERS = {
    **{
        word: str(value)
        for value, word in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())
    },
    **{
        word: str(value) for value, word in enumerate("thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split(), 13)
    },
    **{word: str(value * 10) for value, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)},
}
"""Number words and their digits. 2 million and 2,000,000 differ."""
QUANTITIES = frozenset(
    """first second third fourth fifth sixth seventh eighth ninth tenth once single twice double couple pair hundred thousand
    million billion trillion dozen half quarter triple""".split()
)

UNITS = _first_of(
    """
    millisecond milliseconds ms; seconds sec secs; minute minutes min mins; hour hours hr hrs; day days;
    week weeks; month months; year years; nanometer nanometers nm;
    millimeter millimeters millimetre millimetres mm; centimeter centimeters centimetre centimetres cm;
    meter meters metre metres; kilometer kilometers kilometre kilometres km kms; inch inches; foot feet ft; yard yards yd;
    mile miles mi; mph; milligram milligrams mg; microgram micrograms mcg; gram grams gramme grammes;
    kilogram kilograms kg kgs kilo kilos; tonne tonnes; ton tons; ounce ounces oz; pound pounds lb lbs; stone;
    milliliter milliliters millilitre millilitres ml; liter liters litre litres; gallon gallons; pint pints; cup cups;
    teaspoon teaspoons tsp; tablespoon tablespoons tbsp; celsius centigrade; fahrenheit; kelvin; percent percentage %;
    dollar dollars usd $; euro euros eur €; sterling gbp £; yen jpy ¥; franc francs chf; rupee rupees inr ₹; byte bytes;
    kb kilobyte kilobytes; mb megabyte megabytes; gb gigabyte gigabytes; tb terabyte terabytes; kib; mib; gib; bit bits;
    watt watts; kw kilowatt kilowatts; kwh; volt volts; ampere amperes amps; joule joules; calorie calories;
    kcal kilocalories; hertz hz; ghz; mhz; degree degrees °
    """
)
_SINGULAR = frozenset([unit for unit in UNITS if len(unit) > 2 and f"{unit}s" in UNITS]) - {"sec", "min"} | {"foot", "inch"}
_COUNTED = frozenset([UNITS[unit] for unit in _SINGULAR])
PLURALS = frozenset([unit for unit, first in UNITS.items() if unit.isalpha() and first in _COUNTED and unit not in _SINGULAR])
"""Units that mean several also without a number: which months, which month. Short forms too: in km, in kilometers."""
SHORT_UNITS = {
    "c": "celsius",
    "f": "fahrenheit",
    "k": "kelvin",
    "m": "meter",
    "g": "gram",
    "s": "seconds",
    "h": "hour",
    "l": "liter",
}
"""Letters that are a unit after a number or a degree sign only."""

NEGATIONS = frozenset(
    """not no never non none nothing nobody nowhere neither nor without lacking except excluding besides unless""".split()
)
SCOPES = frozenset(
    """all every each everyone everything entire whole only solely exclusively both but other others another else some several
    few sometimes above over more exceeding below under beneath less fewer any too""".split()
)

OPPOSITES = [
    tuple(side.split("/") for side in pair)
    for pair in _groups(
        """
        increase/increases/increased/rise/rises/rose/rising/grow/grows/raise/up/upgrade
        decrease/decreases/decreased/fall/falls/fell/falling/drop/drops/dropped/reduce/lower/down/downgrade;
        before/prior/earlier after/following/later/afterwards; first/initial last/final;
        maximum/max/highest/tallest/most/largest/biggest/greatest minimum/min/lowest/shortest/least/smallest/fewest;
        max/maximum/most min/minimum/least; big/bigger/biggest/large/larger/largest small/smaller/smallest/little/tiny;
        begin/begins/began/beginning/start/starts/started/starting end/ends/ended/ending/finish/stop/stops/stopped;
        open/opens/opened/opening close/closes/closed/closing; buy/buys/buying/bought/purchase sell/sells/selling/sold;
        accept/accepts/accepted/approve reject/rejects/rejected/decline/refuse;
        allow/allows/allowed/permit/permitted forbid/forbidden/prohibited/banned/prohibit/deny;
        enable/enabled/activate/on disable/disabled/deactivate/off;
        add/adds/added/adding/include/includes/included remove/removes/removed/removing/exclude/excluded/delete/deleted;
        create/creates/created/creating delete/deletes/deleted/deleting/destroy;
        install/installs/installed/installing uninstall/uninstalled/remove;
        encrypt/encrypted/encode/encrypting decrypt/decrypted/decode/decrypting;
        import/imports/imported export/exports/exported;
        upload/uploads/uploaded/uploading download/downloads/downloaded/downloading; push/pushes pull/pulls;
        read/reads/reading write/writes/writing/wrote; send/sends/sent/sending receive/receives/received/receiving;
        give/gives/gave take/takes/took; borrow/borrows/borrowed lend/lends/lent;
        arrive/arrives/arrived/arrival/arriving leave/leaves/left/depart/departs/departure/leaving;
        enter/enters/entry exit/exits; win/wins/won lose/loses/lost; gain/gains/gained loss/lose/loses;
        hot/hotter/hottest/warm/warmer cold/colder/coldest/cool/cooler;
        fast/faster/fastest/quick/quicker slow/slower/slowest; high/higher/highest low/lower/lowest;
        long/longer/longest short/shorter/shortest; old/older/oldest young/younger/youngest/new/newer/newest;
        cheap/cheaper/cheapest/inexpensive expensive/pricey/dearest;
        near/nearer/nearest/close/closer/closest far/farther/farthest/further/furthest/distant;
        above/over/more/greater/exceeding below/under/less/fewer/beneath;
        inside/indoor/indoors/internal outside/outdoor/outdoors/external; left right; north south; east west;
        top/upper bottom/lower; front/forward/forwards back/backward/backwards/rear;
        early/earlier/earliest late/later/latest; day/daytime night/nighttime; morning evening; ascending descending;
        asc desc; horizontal/horizontally vertical/vertically; soft/softer hard/harder; wet/damp dry; raw/uncooked cooked;
        light/lighter dark/darker/heavy/heavier; full empty; rich poor; strong/stronger/strongest weak/weaker/weakest;
        good/better/best/advantage/advantages/pros/benefits
        bad/worse/worst/disadvantage/disadvantages/cons/drawbacks; love/like hate/dislike;
        safe/safely unsafe/dangerous/dangerously; true false;
        success/succeed/succeeds/succeeded failure/fail/fails/failed/failing;
        male/man/men/boy/boys female/woman/women/girl/girls; mother father; son daughter; brother sister; husband wife;
        parent child; buyer/customer seller/vendor; tenant landlord; employer employee; teacher student; doctor patient;
        public private; positive negative; plus/sum/addition minus/difference/subtraction;
        multiply/times divide/divided/quotient; major/serious/severe minor/slight; major/large minor/small;
        winter summer; spring autumn; sunrise/dawn sunset/dusk; import/buy export/sell;
        deposit/deposits withdraw/withdrawal/withdrawals; credit debit; profit loss; asset/assets liability/liabilities;
        online offline; present/attend absent; optional required/mandatory; static dynamic;
        synchronous/sync asynchronous/async; local remote/global; client server; input/inputs output/outputs; even odd;
        numerator denominator; longitude latitude; cause/causes/caused effect/effects/consequence/consequences;
        question/questions answer/answers; avoid/prevent cause; avoid/avoids eat/include/allow;
        charge/charges/charging discharge/discharges/discharging; charge/charges/charged refund/refunds/refunded;
        book/reserve/order cancel/cancels/cancelled/canceled; renew/restart/resume/subscribe cancel/terminate/unsubscribe;
        keep/keeps/store return/returns; connect/connects/attach disconnect/disconnects/detach;
        lock/locks/locked unlock/unlocks/unlocked; load/loads unload/unloads; join/joins split/splits;
        compress/zip decompress/unzip; sick/ill healthy/well; today tomorrow; today yesterday; tomorrow yesterday;
        married single/unmarried/divorced; dead/die/died alive/live/born; frozen/freeze/freezing boil/boiling/boiled;
        freeze/freezing/frozen melt/melting/thaw; ascend/climb descend; domestic international;
        temporary/temporarily permanent/permanently; guilty innocent; because although/though/despite; since until/till/til;
        and or; he/him/his she/her/hers; my/mine his/her/their/your
        """
    )
]
"""Sides of each axis."""

QUESTIONS = frozenset("what which who whom whose when where why how how-to how-many how-much how-long how-often".split())
MODALITIES = frozenset("can-for can could may might must should shall ought able allowed permitted required".split())
TENSES = frozenset("was did will would had been".split())
ABOUT_WORDS = frozenset(
    """spell spells spelled spelt spelling word words rhyme rhymes rhymed rhyming letter letters syllable syllables tense
    tenses plural singular translate translates translated translation translations pronounce pronounces pronounced
    pronunciation synonym synonyms antonym antonyms noun nouns verb verbs adjective adjectives adverb adverbs anagram anagrams
    palindrome palindromes etymology conjugate conjugated conjugation vowel vowels consonant consonants""".split()
)
"""Of questions whose answer depends on a word itself, not on its meaning."""
ABOUT_SYNONYMS = frozenset(
    """mean means meaning define definition slang english french german spanish italian portuguese dutch latin greek chinese
    mandarin japanese korean arabic russian polish turkish hindi swedish danish norwegian finnish czech thai vietnamese hebrew
    digits numeral numerals""".split()
)
"""Of questions that may be about a word, such as its translation."""
LEFT_OUT = frozenset("a an the my our".split())

EQUALS = _first_of(
    """
    is are am; was were; has have; do does; buy purchase; buys purchases; bought purchased; buying purchasing; repair
    mend; repaired mended; repairing mending; begin start; begins starts; big large; bigger larger; biggest largest;
    closest nearest; cheap inexpensive; doctor physician; doctors physicians; country nation; countries nations; bicycle
    bike; bicycles bikes; car automobile; cars automobiles; film movie; films movies; choose select; chose selected; allow
    permit; allows permits; allowed permitted; couch sofa; lawyer attorney; lawyers attorneys; luggage baggage; colour
    color; colours colors; centre center; grey gray; tyre tire; tyres tires; neighbour neighbor; neighbours neighbors;
    favourite favorite; programme program; summarise summarize; organise organize; recognise recognize; cancelled
    canceled; travelling traveling; shops stores; until till; maximum max; minimum min; modify alter; modifies alters;
    modified altered; close shut; closes shuts; help assist; ill sick; apartments flats; fridge refrigerator; tv
    television; rubbish trash garbage; child kid; children kids; product item; products items; wrong incorrect; currently
    now; if whether
    """
)
"""Words of one meaning, part of speech, number and tense, each with the first one of its group."""

_PHRASES = """
    how-to / how do i / how can i / how should i / how do we / how can we / how should we / how to /
    how do #1 / how can #1 / how do i best / how can i best / what is the way to / what is the best way to /
    what is the right way to / what is the correct way to / what is the proper way to / what is a good way to / what is a way to /
    what do i do to / what can i do to / what should i do to /
    in what way do i / in what way can i / show me how to / tell me how to / explain how to / explain to me how to /
    tell me how i can / show me how i can;
    how-to get from / what is the way from / what is the best way from;
    how / in what way;
    can / may / is allowed to / is able to / is permitted to;
    can i / may i / is i allowed to / is i able to / is i permitted to / is it possible to / is it allowed to /
    is it permitted to / is it okay to / is it ok to / is it possible for me to;
    can-for / is it possible for;
    must / has to / need to / needs to;
    must i / do i has to / do i need to / is i required to / is i obliged to / is it required to / is it necessary to /
    is it mandatory to;
    is needed / i need / do i need / is required;
    what time / at what time;
    what °year / in what °year; what °month / in what °month; what century / in what century; on what °day / what °day;
    who / what person; who wrote / what author wrote / what writer wrote; who painted / what painter painted;
    who designed / what architect designed; who invented / what inventor invented; who composed / what composer composed;
    how-much / how much / what amount of / by how much;
    how-many / how many / what is the number of / what number of;
    how-long / how long / for how long / how much time;
    how-often / how often / how frequently;
    why / for what reason / what is the reason that / what is the reason why / how come;
    what happens if / what happens when / what if;
    what is the difference between / what is the differences between;
    is there / is there any;
    enable / turn on / switch on / activate; disable / turn off / switch off / deactivate;
    currently / right now / at moment;
    to / in order to
"""
PHRASES = {
    tuple(form.split()): tuple(forms[0].split())
    for forms in [group.split("/") for group in _PHRASES.split(";")]
    for form in forms[1:]
}
"""Phrases of one meaning, each with the first form of its group. They have no articles, except after "what is"."""

_STATES = "look sound feel seem appear smell rank live die".split()
PHRASES |= {phrase: phrase for verb in _STATES for phrase in [("how", "do", "i", verb), ("how", "can", "i", verb)]}
"""How do I look is not how I can look: no form of "how-to"."""

_OF_PHRASES = {word for phrase in PHRASES for word in phrase if len(phrase) == 1 or word not in STOPWORDS}
SYNONYMS = {word: same for word, same in EQUALS.items() if same not in ("is", "was", "has", "do")} | NUMBERS
"""Words but auxiliary verbs, and their wordings."""
REPLACED = frozenset(EQUALS) | NUMBERS.keys() | UNITS.keys() | LEFT_OUT | _OF_PHRASES
"""Words that may have the wording of another one."""

_OPENINGS = """
    what is / calculate / compute / work out; book / reserve;
    / please / kindly / can you please / could you please / would you please / will you please / please can you /
    please could you / hello / hi / hey / thanks / thank you
"""
OPENINGS = {
    tuple(form.split()): tuple(forms[0].split())
    for forms in [group.split("/") for group in _OPENINGS.split(";")]
    for form in forms[1:]
}
"""The same, only at the start of a sentence or after a comma."""

DEGREES = {
    **dict.fromkeys(("tall", "high"), "height"),
    **dict.fromkeys(("large", "big"), "size"),
    **dict.fromkeys(("hot", "warm", "cold"), "temperature"),
    "long": "length",
    "deep": "depth",
    "wide": "width",
    "heavy": "weight",
    "old": "age",
    "fast": "speed",
}
"""Words after "how", and the noun that asks the same."""

ATTRIBUTES = frozenset("colour size shape age length weight height width depth speed price cost".split())
MEASURES = frozenset(
    """fee fine price cost rent tax rate penalty deposit salary charge premium surcharge discount fare interest humidity area
    volume circumference perimeter diameter distance probability temperature pressure percentage share ratio limit number
    average sum product difference period duration""".split()
)
"""Nouns of which "how high is the" and "what is the" ask the same."""
LENGTHS = frozenset("circumference perimeter diameter distance period duration".split())
"""Those of which "how long is the" asks the same too."""

PREPOSITIONS = frozenset(
    """in on at for with from to by of under over after before during without as when if near inside outside between through
    while since until into onto per because""".split()
)
POWERS = {"able": "able", **dict.fromkeys(("allowed", "permitted", "may"), "allowed")}
"""Words of "can" that differ: am I able to, am I allowed to."""
PLACES = frozenset(
    """lake river mountain volcano desert forest island waterfall city town village port airport bridge tower building skyscraper
    castle church museum stadium country""".split()
)
"""Nouns of which the largest in a place is the largest of it."""
OWNED = (ATTRIBUTES - {"age", "price", "cost"}) | frozenset(
    """capital population currency anthem flag emperor empress king queen president mayor chancellor parliament government area
    coastline circumference diameter radius atmosphere mass temperature symbol formula complexity
    density wavelength frequency capacity language motto ph symptoms""".split()
)
"""Nouns that mean one thing with 's and with "of". Not a portrait, and not an age: that of Rembrandt is his time too."""
ARTICLE_MATTERS = frozenset(
    """question hospital future school college university sea place charge front case day night way time office prison jail
    court church bed control doubt point end order moment past present public private right wrong market town
    work effect fact hand house""".split()
)
"""Words that mean something else after a preposition without an article: out of question, out of the question."""
SUPERLATIVES = frozenset(("most", "least"))
"""Words that mean something else without an article anywhere: most, the most."""
NO_SUPERLATIVES = frozenset("west test rest guest forest request interest honest nest chest harvest protest contest".split())
