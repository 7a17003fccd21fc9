"""Every exception of recollect and how its message is built.

A message says what happened, where, what was expected and got, and what to do. Phrases that programs match on
(the contract gives them in quotes) stand here and nowhere else. Who raises calls `_errors.name_of_the_mistake(...)`.
"""

from recollect._errors.arguments import *
from recollect._errors.chains import *
from recollect._errors.files import *
from recollect._errors.kept import *
from recollect._errors.kinds import *
from recollect._errors.modules import *
from recollect._errors.ranks import *
from recollect._errors.regions import *
from recollect._errors.words import *
