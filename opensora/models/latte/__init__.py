from opensora.models.latte.latte import Latte
from opensora.models.latte.latte_t2v import LatteT2V
