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
"""Words that a paraphrase may add or leave out. Negations, quantifiers and question words are compared on their own."""

TENSES = {
    **dict.fromkeys("is are am do does has have isn't aren't don't doesn't hasn't haven't".split(), "present"),
    **dict.fromkeys("was were did had wasn't weren't didn't hadn't".split(), "past"),
    **dict.fromkeys("will shall won't".split(), "future"),
}
AUXILIARIES = frozenset(TENSES) | frozenset("can could may might must should would can't".split())
ASKED = {
    **dict.fromkeys(
        """author writer person artist painter actor king queen president scientist inventor player singer architect composer poet
        director emperor""".split(),
        "who",
    ),
    **dict.fromkeys("time year date day month century deadline".split(), "when"),
    **dict.fromkeys("place location".split(), "where"),
    **dict.fromkeys("reason reasons cause causes caused makes made".split(), "why"),
    **dict.fromkeys("way method procedure steps".split(), "how"),
    **dict.fromkeys("number population".split(), "how many"),
    **dict.fromkeys("amount cost price".split(), "how much"),
    **dict.fromkeys("length duration".split(), "how long"),
    **dict.fromkeys("distance".split(), "how far"),
    **dict.fromkeys("height".split(), "how tall"),
    **dict.fromkeys("depth".split(), "how deep"),
    **dict.fromkeys("weight".split(), "how heavy"),
    **dict.fromkeys("speed".split(), "how fast"),
    **dict.fromkeys("age".split(), "how old"),
    **dict.fromkeys("width".split(), "how wide"),
    **dict.fromkeys("frequency".split(), "how often"),
    **dict.fromkeys("size area".split(), "how large"),
    **dict.fromkeys("temperature".split(), "how hot"),
}
"""Nouns after "what is the" or "which", and the question that they make of it."""

DEGREES = {word: word for word in "many much long far often deep tall fast heavy old large wide hot".split()} | {
    "frequently": "often",
    "high": "tall",
    "big": "large",
    "warm": "hot",
    "cold": "hot",
    "small": "large",
    "short": "long",
}
"""Words after "how"."""

OPTIONAL = frozenset(
    """novel person people city town country river mountain planet place year time area sentence error exact
    exactly precise simply easily fully eventually yet already still ever nowadays generally typically normally usually
    approximately roughly together""".split()
)
"""Stems of these may be left out: kinds of things that the rest of a question implies, and fillers."""

NUMBERS = {
    **{
        word: str(value)
        for value, word in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())
    },
    **{
        word: str(value) for value, word in enumerate("thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split(), 13)
    },
    **{word: str(value * 10) for value, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)},
    **{
        word: str(value)
        for value, word in enumerate("first second third fourth fifth sixth seventh eighth ninth tenth".split(), 1)
    },
    **dict.fromkeys(("once", "single"), "1"),
    **dict.fromkeys(("twice", "double", "couple", "pair"), "2"),
    **{word: word for word in ("hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "quarter", "triple")},
}
"""Number words and their digits, else themselves: 2 million and 2,000,000 differ."""

UNITS = _first_of(
    """
    millisecond milliseconds ms; seconds sec secs; minute minutes min mins; hour hours hr hrs; day days daily;
    week weeks weekly; month months monthly; year years yearly annual annually; nanometer nanometers nm;
    millimeter millimeters millimetre millimetres mm; centimeter centimeters centimetre centimetres cm;
    meter meters metre metres; kilometer kilometers kilometre kilometres km kms; inch inches; foot feet ft; yard yards yd;
    mile miles mi; mph; milligram milligrams mg; microgram micrograms mcg; gram grams gramme grammes;
    kilogram kilograms kg kgs kilo kilos; tonne tonnes ton tons; ounce ounces oz; pound pounds lb lbs; stone;
    milliliter milliliters millilitre millilitres ml; liter liters litre litres; gallon gallons; pint pints; cup cups;
    teaspoon teaspoons tsp; tablespoon tablespoons tbsp; celsius centigrade; fahrenheit; kelvin; percent percentage %;
    dollar dollars usd $; euro euros eur €; sterling gbp £; yen jpy ¥; franc francs chf; rupee rupees inr ₹; byte bytes;
    kb kilobyte kilobytes; mb megabyte megabytes; gb gigabyte gigabytes; tb terabyte terabytes; kib; mib; gib; bit bits;
    watt watts; kw kilowatt kilowatts; kwh; volt volts; ampere amperes amps; joule joules; calorie calories;
    kcal kilocalories; hertz hz; ghz; mhz; degree degrees °
    """
)
TIMES = frozenset("minute hour day week month year seconds".split())
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

MODALITIES = {
    **dict.fromkeys("can could may might able allowed permitted possible cannot can't".split(), "can"),
    **dict.fromkeys("should shouldn't ought recommended".split(), "should"),
    **dict.fromkeys("must mustn't need needs needed required obliged necessary".split(), "must"),
}
"""What is possible or permitted, advised, required. "Have to" is required too."""

LIGHT_VERBS = _first_of(
    """
    get gets getting got find finds finding go goes going come comes coming; make makes making made; use uses using used;
    take takes taking took need needs require requires required; bring brings brought; like likes liked; want wants;
    look looks; mean means meaning; count counts; happen happens; explain explains; convert; give gives; know knows
    """
)
"""Verbs that a paraphrase may leave out, but not replace by one of another group."""

PERSONS = _first_of("i we me us; you; he him; she her; they them")
ADDRESSED = frozenset("tell show give help let".split())
"""Words before a "me" or "us" that only addresses the reader: tell me."""

NEGATIONS = {
    **dict.fromkeys(("not", "no", "cannot", "non"), "not"),
    **dict.fromkeys(("never",), "never"),
    **dict.fromkeys(("none", "nothing", "nobody", "nowhere", "neither", "nor"), "none"),
    **dict.fromkeys(("without", "lacking"), "without"),
    **dict.fromkeys(("except", "excluding", "besides"), "except"),
    **dict.fromkeys(("unless",), "unless"),
}

SCOPES = {
    **dict.fromkeys(("all", "every", "each", "everyone", "everything", "entire", "whole"), "all"),
    **dict.fromkeys(("only", "solely", "exclusively"), "only"),
    **dict.fromkeys(("both",), "both"),
    **dict.fromkeys(("but",), "but"),
    **dict.fromkeys(("other", "others", "another", "else"), "other"),
    **dict.fromkeys(("some", "several", "few", "sometimes"), "some"),
    **dict.fromkeys(("above", "over", "more", "exceeding"), "above"),
    **dict.fromkeys(("below", "under", "beneath", "less", "fewer"), "below"),
}

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
"""Sides of each axis: a text with one side only and a text with the other side only differ."""

SYNONYMS = _first_of(
    """
    photo picture image; phone smartphone mobile cellphone; buy purchase; sell sold; fix repair mend;
    begin start began commence; end finish ended; big large bigger larger; biggest largest; small little smaller;
    quick fast quicker faster speed rapid rapidly; closest nearest near close nearby; farthest furthest; highest tallest;
    cheap inexpensive; doctor physician; work job; city town; country nation; cost price expensive; remove delete erase;
    show display; list enumerate; error fault; bicycle bike cycle; car automobile; film movie; item product article;
    author writer write wrote written; paint painter painted; border neighbour neighbouring neighbor neighboring adjacent;
    inhabitant population live resident; speak spoken; length long; depth deep; height tall; age old; width wide;
    weigh weight heavy; defeat beat; cause reason; locate location; transfer move;
    change replace modify alter substitute substitution replacement; maximum most; minimum least; frequent often frequently;
    turn switch enable disable activate deactivate; child kid children; flu influenza; tablet pill; bake baking;
    cook cooking; choose select pick choice; check verify;  sum plus add addition;
    minus subtract subtraction difference; differ difference different; divide division; multiply multiplication;
    answer reply respond response; help assist assistance; leave depart departure left; arrive arrival; flight fly;
    book reserve reservation; terminate termination; save saving; safe safety; pregnant pregnancy; boil boiling;
    freeze frozen freezing; treat treatment; permit allow; method approach; goal aim; rule policy; illness disease sickness;
    medicine drug medication; holiday vacation; couch sofa; trousers pants; autumn fall; elevator lift;
    lawyer attorney solicitor; shop store; luggage baggage; ticket fare; submit submission; deadline due; approve approval;
    cancel cancellation; pay payment paid; damage damaged; cover coverage; crash crashing; support supported;
    install installation; explain explanation; describe description; summarise summarize summary; translate translation;
    correct correction; colour color; centre center; grey gray; tyre tire; avoid prevent stop; unwell sick ill;
    death die died dead; birth born; marry married marriage; win won winner; lose lost loser;
    invent invention inventor invented; discover discovery discoverer discovered; found founder founded; build built;
    know knew known; fault blame; lack deficiency shortage; clean cleaning; learn learning study; grow growth growing;
    open opened opening; close closing closed; remote remotely; permanent permanently; temporary temporarily;
    direct directly; legal legally
    """
)
"""Synonyms in questions: each word with the first one of its group."""
