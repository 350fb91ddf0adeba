"""Operations of recurrent layers."""
