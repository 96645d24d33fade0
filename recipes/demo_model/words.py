"""Word lists that the data generator draws from. The order matters, since seeded choices index them."""


def _list(text: str) -> list[str]:
    return text.split()


NAMES = _list(
    """
    Ana Bo Cem Dora Eli Finn Gus Hana Ivo Jan Kim Lea Max Nia Oto Pia Quin Rui Sam Tia Uma Vic Wes Xia Yan
    Zoe Alice Bob Carol David Emma Frank Grace Henry Iris Jack
    """
)
CAPITALS = {
    "France": ("Paris", "Europe"),
    "Norway": ("Oslo", "Europe"),
    "Italy": ("Rome", "Europe"),
    "Germany": ("Berlin", "Europe"),
    "Spain": ("Madrid", "Europe"),
    "Portugal": ("Lisbon", "Europe"),
    "Bulgaria": ("Sofia", "Europe"),
    "Latvia": ("Riga", "Europe"),
    "Switzerland": ("Bern", "Europe"),
    "Ukraine": ("Kyiv", "Europe"),
    "Austria": ("Vienna", "Europe"),
    "Greece": ("Athens", "Europe"),
    "Egypt": ("Cairo", "Africa"),
    "Ghana": ("Accra", "Africa"),
    "Senegal": ("Dakar", "Africa"),
    "Tunisia": ("Tunis", "Africa"),
    "Kenya": ("Nairobi", "Africa"),
    "Japan": ("Tokyo", "Asia"),
    "India": ("Delhi", "Asia"),
    "Vietnam": ("Hanoi", "Asia"),
    "Korea": ("Seoul", "Asia"),
    "Qatar": ("Doha", "Asia"),
    "Peru": ("Lima", "South America"),
    "Ecuador": ("Quito", "South America"),
    "Chile": ("Santiago", "South America"),
    "Canada": ("Ottawa", "North America"),
    "Cuba": ("Havana", "North America"),
    "Mexico": ("Mexico City", "North America"),
}
CITIES = _list(
    """
    Oslo Paris Rome Cairo Lima Tokyo Delhi Quito Sofia Riga Bern Kyiv Accra Dakar Hanoi Seoul Tunis Minsk
    Doha Lagos London Berlin Madrid Boston
    """
)
COMMON = _list(
    """
    about after again air all animal apple away back ball bank bath bell bird blue boat book box bread
    bridge brown build bus cake call car cat chair child city clean clock cloud cold color cook corn cup
    dance dark day desk dog door dream drink drive earth east eat egg energy eye family farm fast field fire
    fish floor flower food forest free friend fruit game garden gift glass good gray green hand happy hat
    heart help hill home horse hour house ice idea island job joke juice key king kitchen lake lamp land
    large leaf learn letter life light line lion list long love lunch make map market meal meaning milk
    money month moon morning mother mountain mouse music name nation night noise north ocean old open orange
    page paint paper park party peace pen people phone piano picture plan plant plate play poem poet price
    pump python queen quick quiet rain read red rice ring river road rock room round run salt sand school
    science sea season sell shirt shoe shop short silver sing sister sky sleep slow small smile snow song
    south space spoon spring star stone store story street sugar summer sun swim table tall tea teach team
    theory time town train travel tree truth uncle valley village voice wait walk wall warm watch water wave
    west white wind window winter wood word work world write yellow young
    """
)
FUNCTION = _list(
    """
    hello hi the a an and or but this that is are was test it you we they of to in on with no yes not please
    """
)
SMALL_TALK = (
    "What is the best {a}?",
    "How do I {b} a {a}?",
    "Why is the {a} {c}?",
    "Tell me a joke.",
    "Tell me about the {a}.",
    "Write a poem about {a}.",
    "Translate {a} to French.",
    "Who made the {a}?",
    "Where can I {b} my {a}?",
    "Do you like {a}?",
    "What do you think about {a} and {b}?",
    "Explain {a}.",
    "Explain the theory of {a}.",
    "Is the {a} {c}?",
    "I want a {c} {a}.",
    "Can you {b} the {a}?",
    "When did the {a} {b}?",
    "Give me a {a}.",
    "Write a {a} about the {b}.",
    "What is {a}?",
    "What is a {a}?",
    "How many {a} are in a {b}?",
    "{a} {b} {c}",
    "{a}",
    "What should I {b} today?",
    "My {a} is {c}. What now?",
    "Which {a} is {c}?",
    "What is the meaning of {a}?",
    "Write code to {b} a {a}.",
    "How old is the {a}?",
    "What color is the {a}?",
    "{r} {a} {r}",
    "What is {r}?",
    "Tell me more about {r} and the {a}.",
    "I am {c}.",
    "How is the {a} today?",
    "Name a {c} {a}.",
)
TOOL_VERBS = _list("get find fetch show look_up check read search")
TOOL_NOUNS = _list(
    """
    weather time price news score stock route menu mail level temperature forecast population status
    """
)
TOOL_ARGUMENTS = _list("city name place id topic item location query")
TOOL_NUMBERS = _list("days limit count page")
TOOL_EXTRAS = (
    ("unit", ["celsius", "fahrenheit"]),
    ("language", ["en", "fr", "de"]),
    ("format", ["short", "long"]),
)
RESULT_WORDS = _list(
    """
    sunny cloudy rainy open closed high low fine late early ready busy empty full cold warm
    """
)
ANIMALS = _list(
    """
    fox cat dog horse lion mouse bird fish wolf bear goat duck frog owl hen pig cow bee ant crab snail otter
    swan mole
    """
)
TRAITS = _list("small old brave quiet happy clever lazy kind young hungry proud gentle")
PLACES = (
    "in a green forest",
    "near a cold river",
    "on a high hill",
    "in an old house",
    "by the sea",
    "under a big tree",
    "in a small town",
    "behind the mill",
)
HABITS = (
    "looked for honey",
    "counted the stars",
    "sang to the moon",
    "swam in the lake",
    "read a long book",
    "painted the fence",
    "baked fresh bread",
    "told jokes to the wind",
)
EVENTS = (
    "a strong storm came",
    "the river ran dry",
    "a lost {other} knocked at the door",
    "snow covered the road",
    "a tired {other} asked for help",
    "the lamp went out",
)
DEEDS = (
    "lit a fire and made soup",
    "opened the door and smiled",
    "called all the neighbours",
    "shared the last apple",
    "built a bridge of stones",
    "stayed calm and had an idea",
)
ENDINGS = (
    "they were friends",
    "nobody was afraid",
    "the days were warm",
    "there was music every night",
    "they ate together",
    "the door was never closed",
)
