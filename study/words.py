"""Word lists for the skills of families.py: small, common, written for this study.

Each list is what a grader accepts, so it is meant to be nearly complete for common words: a right answer that is
missing here counts as wrong, for every method alike. What goes by several names or spellings is one entry, the names
joined by a slash. A plural is the same word (`singular`).
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def singular(word: str) -> str:
    """A word without the ending of a plural: "cherries" and "cherry" give the same, and so do "tomatoes" and "tomato".

    It is for comparing: "tennis" loses its s, too.
    """
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith(("oes", "ches", "shes", "xes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


CATEGORIES: dict[str, tuple[str, ...]] = {
    "animal": _words(
        "dog cat horse cow pig sheep goat lion tiger bear wolf/wolves fox deer rabbit mouse/mice rat elephant giraffe "
        "zebra monkey gorilla chimpanzee kangaroo koala panda penguin eagle owl hawk parrot duck goose/geese "
        "chicken turkey swan pigeon snake lizard turtle tortoise frog toad crocodile alligator shark whale dolphin "
        "seal octopus squid crab lobster salmon tuna bee ant spider butterfly camel donkey leopard cheetah jaguar "
        "hippopotamus/hippo rhinoceros/rhino squirrel otter beaver raccoon hedgehog bat ostrich flamingo bison "
        "buffalo moose hamster hyena sloth bird fish"
    ),
    "fruit": _words(
        "apple banana orange pear peach plum cherry grape lemon lime mango papaya pineapple strawberry "
        "raspberry blueberry blackberry kiwi melon watermelon apricot fig date coconut pomegranate grapefruit "
        "tangerine guava cranberry nectarine avocado lychee cantaloupe tomato"
    ),
    "vegetable": _words(
        "carrot potato onion garlic tomato cucumber lettuce spinach cabbage broccoli cauliflower pea bean "
        "corn celery kale beet/beetroot radish turnip zucchini eggplant pumpkin squash asparagus leek "
        "mushroom pepper artichoke"
    ),
    "color": _words(
        "red blue green yellow orange purple pink brown black white gray/grey violet indigo turquoise gold "
        "silver beige maroon crimson magenta cyan teal navy lavender scarlet ivory"
    ),
    "country": _words(
        "france germany italy spain portugal england britain scotland ireland norway sweden finland denmark "
        "poland russia ukraine greece turkey egypt morocco kenya nigeria ghana ethiopia china japan india korea "
        "vietnam thailand indonesia malaysia philippines australia canada mexico brazil argentina chile peru "
        "colombia cuba iceland austria switzerland belgium netherlands hungary romania bulgaria croatia iran "
        "iraq israel pakistan nepal"
    ),
    "sport": _words(
        "soccer football basketball baseball tennis golf hockey volleyball rugby cricket swimming running "
        "boxing wrestling skiing cycling badminton rowing gymnastics surfing skating karate judo archery "
        "fencing sailing athletics track lacrosse softball"
    ),
    "musical instrument": _words(
        "piano guitar violin drum flute trumpet clarinet saxophone cello harp trombone tuba oboe banjo "
        "viola organ ukulele harmonica bass accordion xylophone keyboard mandolin"
    ),
    "body part": _words(
        "head arm leg hand foot/feet eye ear nose mouth finger toe knee elbow shoulder neck back chest stomach heart "
        "brain lung liver hair skin tongue tooth/teeth lip chin wrist ankle hip thumb kidney"
    ),
    "piece of clothing": _words(
        "shirt pants shoe hat coat jacket dress skirt sock scarf/scarves glove sweater jeans belt "
        "tie shorts boot suit blouse vest cap hoodie underwear trousers cardigan"
    ),
    "vehicle": _words(
        "car/automobile bus truck bicycle/bike motorcycle/motorbike train plane/airplane/aeroplane boat ship van "
        "taxi tractor helicopter scooter tram subway ambulance submarine wagon"
    ),
    "language": _words(
        "english french german spanish italian portuguese russian chinese japanese korean arabic hindi greek "
        "latin turkish polish dutch swedish norwegian danish finnish hebrew swahili mandarin bengali urdu "
        "vietnamese thai"
    ),
    "day of the week": _words("monday tuesday wednesday thursday friday saturday sunday"),
    "month": _words(
        "january february march april may june july august september october november december"
    ),
    "planet": _words("mercury venus earth mars jupiter saturn uranus neptune"),
    "metal": _words(
        "iron gold silver copper aluminum/aluminium tin lead zinc nickel steel titanium platinum mercury brass "
        "bronze magnesium chromium tungsten sodium"
    ),
    "tool": _words(
        "hammer saw drill screwdriver wrench pliers knife/knives axe/ax shovel rake chisel ladder scissors file "
        "level hoe spade"
    ),
    "flower": _words(
        "rose tulip daisy lily sunflower orchid violet daffodil lavender iris poppy carnation marigold lotus "
        "jasmine peony hibiscus"
    ),
    "drink": _words(
        "water milk tea coffee juice soda beer wine lemonade cola cocoa smoothie champagne whiskey/whisky vodka rum"
    ),
}  # fmt: skip

OPPOSITES: dict[str, tuple[str, ...]] = {
    "hot": ("cold", "cool"), "big": ("small", "little", "tiny"), "up": ("down",), "left": ("right",),
    "day": ("night",), "old": ("new", "young"), "fast": ("slow",), "happy": ("sad", "unhappy"),
    "rich": ("poor",), "strong": ("weak",), "long": ("short",), "light": ("dark", "heavy"),
    "open": ("closed", "close", "shut"), "full": ("empty",), "wet": ("dry",), "hard": ("soft", "easy"),
    "good": ("bad", "evil"), "high": ("low",), "early": ("late",), "clean": ("dirty",),
    "near": ("far",), "first": ("last",), "in": ("out",), "on": ("off",), "black": ("white",),
    "true": ("false",), "win": ("lose",), "buy": ("sell",), "love": ("hate",), "push": ("pull",),
    "start": ("stop", "end", "finish"), "loud": ("quiet", "soft", "silent"), "thick": ("thin",),
    "wide": ("narrow",), "deep": ("shallow",), "sweet": ("sour", "bitter"), "safe": ("dangerous", "unsafe"),
    "north": ("south",), "east": ("west",), "always": ("never",), "before": ("after",), "above": ("below",),
    "inside": ("outside",), "alive": ("dead",), "asleep": ("awake",), "smooth": ("rough",), "cheap": ("expensive",),
}  # fmt: skip

RHYMES: tuple[tuple[str, ...], ...] = (
    _words("cat hat bat rat mat sat fat pat flat chat that at"),
    _words("day way say play may pay stay gray bay ray today they okay"),
    _words("light night right sight fight might bright tight flight kite white bite site quite height"),
    _words("tree see bee free sea me key knee three tea be he she we"),
    _words("car star far bar jar tar are"),
    _words("dog log fog frog hog jog bog"),
    _words("sun run fun gun bun one done son won none"),
    _words("ring sing king thing spring wing bring string swing"),
    _words("rain train pain brain main plane cane lane chain gain plain"),
    _words("ball tall fall call wall hall small all mall"),
    _words("cake lake make take bake snake shake wake break"),
    _words("boat coat goat note vote float wrote"),
    _words("moon spoon soon noon june tune balloon"),
    _words("bed red head said led fed bread read dead"),
    _words("sky fly high my why by try cry dry lie pie tie buy eye"),
    _words("blue shoe true you two do new zoo through"),
)

NOUNS = _words(
    "river mountain garden window table chair house road bridge school market forest island castle village "
    "winter summer morning evening music letter picture doctor teacher farmer baker sailor soldier brother "
    "sister father mother friend paper pencil pocket basket bottle candle mirror ladder button blanket kitchen "
    "station engine dinner cloud storm shadow feather leaf stone sand wheel rope clock coin"
)

ADJECTIVES = _words("green quiet old small warm heavy bright empty round simple broken gentle")

TOPICS = _words(
    "gravity photosynthesis democracy electricity music painting chess football cooking bread coffee rain snow "
    "volcanoes earthquakes oceans rivers forests bees whales dinosaurs planets stars computers robots bicycles "
    "trains bridges money banks schools books poetry history sleep exercise friendship happiness water glass "
    "paper iron gold maps clocks calendars gardens farming fishing medicine"
)

# Every noun of these lists that stands for a thing, once, for sentences with a given word.
_THINGS = ("animal", "fruit", "vegetable", "sport", "musical instrument", "vehicle", "metal", "tool", "flower", "drink")
EVERYDAY = tuple(sorted({*NOUNS, *(entry.split("/")[0] for category in _THINGS for entry in CATEGORIES[category])}))
