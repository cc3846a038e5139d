"""The word lists of the generated documents: every word is one token with a leading space.

With more than a hundred names, forty animals and fifty places, a guess from the list is right
in less than 3 % of cases.  `EVAL_NAMES` and `EVAL_PLACES` are never a fact of a training document;
the model meets these words only in stories and in random sequences.
"""


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words("""
Ada Alba Amos Anna Anton Arlo Asa Basil Bea Bella Bruno Cara Carl Cecil Celia Clara Cleo Cora Cyrus
Daisy Dario Dora Edgar Edith Edna Eli Elsa Emil Enid Enzo Erik Esme Ethel Ezra Faye Felix Finn
Flora Frida Fritz Gemma Gus Gwen Hanna Hazel Hector Heidi Hilda Hugo Ida Igor Ines Ingrid Iris
Ivan Ivy Jonas Josie Judy Julia June Kira Klaus Kurt Lars Laura Lena Leo Lily Lola Luca Lucy Luna
Mabel Magnus Marco Marta Maud Max Mia Milo Mona Myra Nadia Nell Nico Nina Nora Oliver Olga Orla
Oscar Otis Otto Pablo Paul Pearl Percy Petra Pia Quinn Ralph Ramon Rita Rosa Rufus Ruth Sasha
Selma Silas Simon Sofia Stella Sven Tessa Theo Tilda Tobias Toby Ulla Una Vera Victor Viola Walter
Wanda Wendy Willa Yara Yusuf Zelda Zoe
""")

EVAL_NAMES = _words("""
Agnes Axel Boris Brenda Caleb Dinah Elmer Fiona Gilda Harold Imogen Jasper Karin Lionel Martha
Nolan Opal Phoebe Quincy Rosie Saul Thea Ursula Vince Wilma Xander Yvonne Zack Bertha Conrad
Della Edwin
""")

COLOURS = _words("""
red blue green brown black white grey yellow pink purple orange golden silver striped spotted tiny
old young happy sleepy
""")

ANIMALS = _words("""
dog cat horse cow pig goat sheep hen duck goose fox wolf bear hare mouse rat mole toad frog snake
owl crow hawk dove robin swan crab fish whale seal otter beaver badger donkey pony lamb monkey
tiger lion zebra camel parrot turtle lizard spider bee
""")

THINGS = _words("""
key ring coin lamp book cup plate spoon hat coat shoe scarf glove bell drum flute kite ball doll
rope candle basket bottle box map letter clock mirror brush comb knife pencil stone shell button
ribbon blanket pillow umbrella lantern
""")

PLACES = _words("""
barn river garden forest kitchen attic cellar market church school tower bridge harbour meadow
valley mountain cave island beach castle palace temple library museum station bakery stable shed
tent cottage cabin mill well pond lake swamp desert orchard park field yard street square hall
tunnel quarry farm inn shop bank theatre hospital office garage chapel lighthouse windmill
""")

EVAL_PLACES = _words("prison factory cinema jungle bedroom nursery village airport stadium canyon")
