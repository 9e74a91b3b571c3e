"""English word lists for the guard: stems, irregular forms, synonyms, opposites, numbers and units.

Everyday words, short on purpose: a word that is not listed is compared by its stem. A slash separates words of one
group.
"""

from __future__ import annotations

from functools import lru_cache

from rekindle.knowledge.segment import STOPWORDS


def _groups(text: str) -> dict[str, str]:
    """Each word -> the first word of its group."""
    groups = [group.split("/") for group in text.split()]
    return {word: group[0] for group in groups for word in group}


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEGATIONS = word_set("not no non never none nobody nothing nowhere neither nor cannot without unable lack except")

# Words that carry no content: politeness, auxiliary verbs, fillers.
_CARRYING = """
please tell explain describe remind know list say said says mention mentioned according think thinks thought opinion
opinions view views attitude ever really very actually exactly roughly approximately currently nowadays now still
already quite certain particular specific specifically generally typically simply just even much many kind kinds type
types sort sorts thing things something anything someone somebody anyone anybody everyone one ones way ways reason
reasons possible example examples etc being having done doing get gets got getting gotten does might may must shall
ought let lets up out off over down again else such other another own same each every both either while during through
because since though although however per via upon among around like there here hi hello hey ok okay yes go goes went
gone going come comes came coming make makes made making take takes took taken taking happen happens happened
happening use uses used using try tries tried trying put puts putting attend attends attended attending discuss
discusses discussed discussing discussion talked talking regarding concerning towards toward terms myself yourself
himself herself itself themselves ourselves yourselves along back likely probably perhaps maybe considered person
people point time times item items topic topics subject subjects mean means meaning become becomes became find finds
found part parts bit lot lots idea ideas able stuff involve involves involved believe believes believed us
"""
LIGHT = (STOPWORDS | word_set(_CARRYING)) - NEGATIONS

_IRREGULAR = _groups("""
go/goes/went/gone/going be/is/am/are/was/were/been/being have/has/had/having do/does/did/done/doing
make/makes/made/making take/takes/took/taken/taking give/gives/gave/given/giving come/comes/came/coming
see/sees/saw/seen/seeing say/says/said/saying tell/tells/told/telling think/thinks/thought/thinking
know/knows/knew/known/knowing feel/feels/felt/feeling find/finds/found/finding leave/leaves/left/leaving
meet/meets/met/meeting run/runs/ran/running buy/buys/bought/buying sell/sells/sold/selling
bring/brings/brought/bringing begin/begins/began/begun/beginning write/writes/wrote/written/writing read/reads/reading
speak/speaks/spoke/spoken/speaking eat/eats/ate/eaten/eating drink/drinks/drank/drunk/drinking
drive/drives/drove/driven/driving fly/flies/flew/flown/flying lose/loses/lost/losing win/wins/won/winning
send/sends/sent/sending spend/spends/spent/spending build/builds/built/building teach/teaches/taught/teaching
catch/catches/caught/catching hear/hears/heard/hearing hold/holds/held/holding keep/keeps/kept/keeping
sleep/sleeps/slept/sleeping sing/sings/sang/sung/singing swim/swims/swam/swum/swimming wear/wears/wore/worn/wearing
grow/grows/grew/grown/growing draw/draws/drew/drawn/drawing choose/chooses/chose/chosen/choosing
break/breaks/broke/broken/breaking pay/pays/paid/paying become/becomes/became/becoming
forget/forgets/forgot/forgotten/forgetting fall/falls/fell/fallen/falling sit/sits/sat/sitting
stand/stands/stood/standing understand/understands/understood/understanding die/dies/died/dying lie/lies/lied/lying
man/men woman/women child/children/kid/kids person/persons/people foot/feet tooth/teeth mouse/mice life/lives
wife/wives knife/knives
""")

# Only words that rarely mean anything else in a question.
_SAME = _groups("""
quit/resign buy/purchase obtain/acquire get/receive give/hand join/enroll/enrol move/relocate trip/journey live/reside
stay/remain choose/pick/select decide/decision
suggest/recommend/propose/advise/suggestion/recommendation/proposal/advice answer/respond/reply/response ask/inquire
organize/organise/arrange create/build repair/fix/mend help/assist/support/aid exercise/workout relax/unwind/destress
hurt/injure/injury heal/recover/recovery marry/wed/wedding/married/marriage die/death born/birth perform/performance
represent/symbolize/symbolise motivate/inspire/inspiration/inspiring cook/prepare teach/instruct improve/enhance
reduce/decrease/lower/lessen delete/remove/erase search/seek show/display need/require allow/permit prevent/avoid
solve/resolve occur/happen own/possess collect/collection differ/difference/different importance/important
mother/mom/mum/mommy/mama father/dad/daddy/papa grandmother/grandma/granny grandfather/grandpa boy/lad husband/hubby
friend/buddy/pal dog/puppy/pup/doggy cat/kitten/kitty favorite/favourite/fave color/colour movie/film
photo/picture/photograph/pic phone/smartphone/telephone/cellphone/mobile website/site/webpage television/tv/telly
computer/pc advertisement/ad/advert app/application job/occupation/profession/career salary/pay/wage money/cash
price/cost present/gift vacation/holiday crash/accident/collision car/automobile/auto bicycle/bike/cycle
airplane/plane/aeroplane hike/trek house/home apartment/flat store/shop university/college/uni lesson/class
teacher/instructor student/pupil doctor/physician medicine/medication illness/disease/sickness ill/sick meal/dish
food/cuisine song/track hobby/pastime goal/aim/objective/target problem/issue/trouble error/mistake method/approach
benefit/advantage drawback/disadvantage/downside feature/characteristic city/town country/nation area/region
beach/seaside sea/ocean forest/woods large/big/huge small/little/tiny quick/fast/rapid smart/intelligent/clever
beautiful/pretty happy/glad sad/unhappy rich/wealthy difficult/hard/tough easy/simple nearby/close/near annual/yearly
initial/original best/top/greatest america/usa/american uk/britain/british europe/european india/indian china/chinese
japan/japanese germany/german france/french italy/italian spain/spanish russia/russian canada/canadian
australia/australian mexico/mexican brazil/brazilian stop/cease meet/meetup baby/infant dinner/supper garden/yard
street/road drawing/sketch author/writer singer/vocalist concert/gig game/match competition/contest/tournament
prize/award exam/test/examination homework/assignment grade/mark boss/manager colleague/coworker email/mail
password/passcode pain/ache cure/remedy surgery/operation flu/influenza tired/exhausted angry/mad/upset
nervous/anxious fear/dread excited/thrilled funny/hilarious weird/strange/odd
amazing/awesome/incredible/wonderful/terrific bad/terrible/awful wrong/incorrect correct/accurate famous/renowned
cheap/inexpensive/affordable expensive/costly/pricey thin/slim old/elderly far/distant whole/entire continue/proceed
postpone/delay/reschedule plan/intend achieve/accomplish clean/tidy hide/conceal destroy/ruin argue/quarrel
speak/talk/speech shout/yell look/appear/seem notice/observe identify/recognize/recognise recall/remember
realize/realise understand/comprehend hope/wish want/desire like/enjoy/love hate/detest protect/guard save/rescue
walk/stroll run/jog learn/discover rent/lease neighbor/neighbour theater/theatre center/centre
organization/organisation program/programme gray/grey behavior/behaviour license/licence jewelry/jewellery
travel/travelled/travelling/traveled/traveling name/named/called recent/recently/lately clothes/clothing/outfit
shoe/sneaker sofa/couch trash/garbage/rubbish soccer/footy cookie/biscuit candy/sweets subway/metro/underground
truck/lorry gas/petrol/gasoline pants/trousers lawyer/attorney policeman/cop police/cops pregnant/expecting
hometown/birthplace degree/diploma scared/afraid/frightened brave/courageous/courage/bravery luck/fortune
dream/aspiration income/earnings debt/loan finish/complete/end/conclude/ending relationship/romance argument/dispute
calm/peaceful loud/noisy often/frequently/regularly/regular/frequent/usual/usually begin/start/commence/launch
""")

_OPPOSITES = """
after/before afterwards/beforehand later/earlier late/early latest/earliest last/first newest/oldest new/old young/old
younger/older more/less more/fewer most/least most/fewest maximum/minimum max/min best/worst better/worse good/bad
high/low higher/lower highest/lowest large/small larger/smaller largest/smallest bigger/smaller biggest/smallest
long/short longer/shorter longest/shortest fast/slow faster/slower fastest/slowest near/far nearest/farthest
inside/outside indoor/outdoor above/below over/under upper/lower upstairs/downstairs left/right north/south east/west
with/without for/against pro/con advantage/disadvantage strength/weakness benefit/risk begin/finish begin/quit
begin/stop open/close enter/leave arrive/leave return/leave arrive/depart join/leave join/quit come/go buy/sell
borrow/lend give/receive give/take give/get send/receive win/lose find/lose gain/lose increase/decrease
increase/reduce improve/worsen rise/fall grow/shrink up/down add/remove add/delete add/subtract install/uninstall
subscribe/unsubscribe enable/disable activate/deactivate lock/unlock load/unload upload/download import/export
encode/decode encrypt/decrypt on/off push/pull save/spend save/delete save/waste accept/reject accept/refuse
accept/decline agree/disagree agree/refuse approve/reject suggest/reject allow/forbid allow/prohibit allow/prevent
love/hate like/hate like/dislike prefer/avoid try/avoid attend/miss remember/forget succeed/fail pass/fail teach/learn
ask/answer question/answer employer/employee hire/fire marry/divorce married/divorced married/single alive/dead
live/die true/false real/fake right/wrong possible/impossible legal/illegal safe/dangerous healthy/unhealthy
happy/unhappy happy/sad easy/difficult easy/hard cheap/expensive rich/poor strong/weak hot/cold warm/cold warm/cool
wet/dry light/dark light/heavy full/empty hard/soft clean/dirty male/female man/woman boy/girl husband/wife
mother/father son/daughter brother/sister uncle/aunt grandmother/grandfather parent/child public/private urban/rural
internal/external positive/negative active/passive introvert/extrovert morning/evening morning/night day/night
breakfast/dinner lunch/dinner breakfast/lunch summer/winter spring/autumn sunrise/sunset past/future previous/next
last/next cause/effect cause/cure cause/prevent prevent/treat similarity/difference similar/different same/different
include/exclude always/never all/none everybody/nobody both/neither question/solution problem/solution debit/credit
supply/demand profit/loss asset/liability domestic/foreign wholesale/retail attack/defend hero/villain friend/enemy
guest/host buyer/seller borrower/lender landlord/tenant
"""

# Phrasal verbs, and the one word they stand for.
_PHRASES = """
sign/up/join give/away/donate get/back/return come/back/return go/back/return get/home/return pass/away/die
find/out/learn set/up/organize take/up/begin begin/off/begin kick/off/begin work/out/exercise wind/down/relax
throw/away/discard turn/on/enable turn/off/disable switch/on/enable switch/off/disable look/for/search get/rid/remove
carry/out/perform give/up/quit turn/down/reject call/off/cancel put/off/postpone get/married/marry get/hurt/hurt
get/together/meet meet/up/meet log/in/login sign/in/login close/by/nearby stand/for/represent deal/with/handle
cope/with/handle like/best/favorite like/most/favorite love/best/favorite love/most/favorite other/than/besides
apart/from/besides aside/from/besides
"""

MONTHS = _groups(
    "january/jan february/feb march april/apr may june/jun july/jul august/aug september/sep/sept october/oct "
    "november/nov december/dec"
)
UNSURE_MONTHS = frozenset(["may", "march"])  # also an auxiliary verb, and a way to walk
DAYS = _groups(
    "monday tuesday/tue/tues wednesday thursday/thu/thurs friday/fri saturday sunday weekend weekday today yesterday "
    "tomorrow tonight midnight noon"
)

_ONES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
NUMBERS = {
    **{word: value for value, word in enumerate(_ONES.split())},
    **{word: 10 * value for value, word in enumerate(_TENS.split(), start=2)},
    "dozen": 12,
    "twice": 2,
    "couple": 2,
    "pair": 2,
    "thrice": 3,
}
SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "k": 1000,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
}
ORDINALS = {word: value for value, word in enumerate(_ORDINALS.split(), start=1)}

UNITS = _groups("""
second/seconds/sec/secs minute/minutes/min/mins hour/hours/hr/hrs day/days week/weeks month/months year/years/yr/yrs
meter/meters/metre/metres/m kilometer/kilometers/kilometre/kilometres/km/kms centimeter/centimeters/cm mile/miles/mi
foot/feet/ft inch/inches gram/grams/g kilogram/kilograms/kg/kgs/kilo/kilos pound/pounds/lb/lbs ounce/ounces/oz
liter/liters/litre/litres/l gallon/gallons dollar/dollars/$/usd/bucks euro/euros/€/eur sterling/£/gbp
rupee/rupees/rs/inr/₹ yen/¥/jpy percent/%/percentage degree/degrees celsius fahrenheit calorie/calories/kcal
kilobyte/kb megabyte/mb gigabyte/gb/gbs/gigabytes terabyte/tb watt/watts volt/volts
""")

DIRECTIONS = {
    "to": frozenset(["from"]),
    "from": frozenset(["to"]),
    "by": frozenset(["about", "for", "against"]),
    "about": frozenset(["by"]),
    "for": frozenset(["by", "against"]),
    "against": frozenset(["by", "for"]),
}
PEOPLE = _groups("he/him/his/himself she/her/hers/herself")
OWNERS = _groups("my/mine/our/ours your/yours")
# Verbs without content of their own: they may be missing in one question, but must not differ.
ACTIONS = _groups("""
go/goes/went/gone/going/come/comes/came/coming/attend/attends/attended/attending make/makes/made/making
take/takes/took/taken/taking find/finds/found use/uses/used/using become/becomes/became
""")

_VOWELS = frozenset("aeiouy")
_SHORTEST = 3  # letters that must be left without the ending


def _cut(word: str) -> str:
    """A word without its ending."""
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > _SHORTEST:
        word = word[:-2] if word.endswith(("sses", "xes", "ches", "shes", "zes")) else word[:-1]
    for ending in ("ing", "ed"):
        left = word[: -len(ending)]
        if word.endswith(ending) and len(left) >= _SHORTEST and _VOWELS & set(left):
            if word.endswith("ied"):
                return left[:-1] + "y"
            return left[:-1] if left[-1] == left[-2] and left[-1] not in "ls" else left
    if word.endswith("ness") and len(word) > 6:
        word = word[:-4]
    if word.endswith("ly") and len(word) > 5:
        word = word[:-2]
    return word


def _bare(word: str) -> str:
    """Without a last `e`, which endings take away, and a last `y` as `i` ("easy", "easily")."""
    if word.endswith("y") and len(word) > _SHORTEST:
        return word[:-1] + "i"
    return word[:-1] if word.endswith("e") and len(word) > _SHORTEST else word


@lru_cache(maxsize=8192)
def stem(word: str) -> str:
    """The common stem of a word's forms; synonyms share one stem."""
    base = _IRREGULAR.get(word, word)
    if base == word and base not in _SAME:
        cut = _cut(word)
        known = (form for form in (cut, cut + "e", cut.removesuffix("i") + "y") if form in _SAME or form in _IRREGULAR)
        base = next(known, cut)
        base = _IRREGULAR.get(base, base)
    return _bare(_SAME.get(base, base))


def _opposites() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for pair in _OPPOSITES.split():
        one, other = map(stem, pair.split("/"))
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return {word: frozenset(others) for word, others in found.items()}


OPPOSITES = _opposites()
# A word that may stand for another: "get" for "buy", but not "sell" for "buy".
BROADER = {
    stem(word): stem(broad)
    for broad, words in (("get", "buy adopt obtain earn"), ("make", "bake cook create"), ("go", "visit travel"))
    for word in words.split()
}
PHRASES = {(stem(verb), after): word for verb, after, word in (line.split("/") for line in _PHRASES.split())}
