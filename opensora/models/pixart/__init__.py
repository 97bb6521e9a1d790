from opensora.models.pixart.pixart import PixArt, PixArtMS, PixArtSigma
